# Two commands do everything: `make demo` and `make test`. Both set up .venv first.

SHELL := /bin/bash
BIN := .venv/bin
DEMO := build/demo
WORKERS ?= 2

.PHONY: demo test matrix lint generated docs docs-site setup clean

# Emits, shows the decisions and a refusal, and runs the differential gate: on a GPU if there is one, else on the CPU.
demo: setup
	$(BIN)/mhcgen emit --streams 4 --fuse pre --out $(DEMO)
	head -n 12 $(DEMO)/kernel.cu
	$(BIN)/mhcgen explain --streams 4 --fuse pre
	$(BIN)/mhcgen emit --streams 4 --fuse site; test $$? = 3
	$(BIN)/mhcgen check --streams 4 --hidden 4096 --fuse pre --tokens 1,4,8 --arms all

test: setup lint
	$(BIN)/mhcgen emit --all --check
	$(BIN)/mhcgen docs --check
	$(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m pytest --doctest-modules mhcgen --ignore mhcgen/torch
	$(BIN)/python -m pytest -n $(WORKERS) generated
	$(BIN)/python -m pytest -n $(WORKERS)

# Every model at every stream count, width and dtype: bounds, schedules, races. Too long for every day.
matrix: setup
	$(BIN)/python -m pytest --slow -n $(WORKERS) tests/models/test_models.py -k test_the_matrix

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

# The snapshots under generated/ and docs/refusals.md; read their diff.
generated: setup
	$(BIN)/mhcgen emit --all

docs: setup
	$(BIN)/mhcgen docs --write

# The documents as a site that needs no server: build/site/index.html.
docs-site: setup
	$(BIN)/mkdocs build --strict

setup:
	@./.ci/setup

clean:
	rm -rf build dist *.egg-info .venv .venv-tools .pytest_cache .mypy_cache .ruff_cache .hypothesis
