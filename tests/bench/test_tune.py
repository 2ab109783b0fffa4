"""The search for the fastest schedule: what leads, what is refused, what is kept, and what is never believed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mhcgen
from mhcgen import cache, cli, tuned
from mhcgen.bench.device import Dry
from mhcgen.bench.measure import Case, Prepared, Unmeasurable
from mhcgen.build import build
from mhcgen.errors import CheckFailed, RefusedError, UsageError
from mhcgen.ir import Program
from mhcgen.log import Decision
from mhcgen.passes import run_pipeline
from mhcgen.plan import Options, Plan
from mhcgen.runtime import HostRunner, Module
from mhcgen.tune import TuneReport, tune
from mhcgen.tuned import Tuned

GPU = "none: dry run"
ASKED = Options(fuse="pre")
SMALL: dict[str, Any] = {"streams": 2, "hidden": 512, "iters": 2, "dtype": "bf16"}
VALUES: dict[str, tuple[Any, ...]] = {
    "slab": ("auto", "global"), "threads": (None, 33, 64, 128), "placement": ("row",)
}


@pytest.fixture(scope="module")
def module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of this module's own; what was compiled stays in it from test to test."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MHCGEN_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def own_cache(module_cache: Path) -> Path:
    """The cache without anything that was tuned."""
    for path in module_cache.rglob(f"*{tuned.SUFFIX}"):
        path.unlink()
    return module_cache


@pytest.fixture(scope="module")
def program() -> Program:
    return build(**SMALL)


class Clock:
    """A timer with a price for each option; says what it was asked."""

    def __init__(self, **prices: float) -> None:
        self.prices = prices
        self.asked: list[tuple[Options, int]] = []

    def __call__(self, prepared: Prepared, case: Case, tokens: int) -> float:
        assert prepared.row["differing_bytes"] == 0
        self.asked.append((case.options, tokens))
        names = [f"{name}_{value}" for name, value in vars(case.options).items()]
        return 10.0 + tokens + sum(self.prices.get(name, 0.0) for name in names)


def search(
    program: Program,
    clock: Clock,
    options: Options = ASKED,
    tokens: tuple[int, ...] = (1, 2),
    device: Dry | None = None,
    keep: bool = True,
) -> TuneReport:
    return tune(program, options, tokens, device or Dry(), timer=clock, values=VALUES, keep=keep)


def test_the_fastest_schedule_wins(program: Program) -> None:
    report = search(program, Clock(slab_global=-2.0, threads_128=-3.0, placement_row=1.0))
    assert report.best.changes == {"slab": "global", "threads": 128}
    assert report.best.us == (6.0, 7.0)
    assert report.trials[0].changes == {}
    assert report.trials[0].us == (11.0, 12.0)
    assert report.table().splitlines()[1].split() == ["slab", "global,", "threads", "128", "6.00", "7.00"]
    assert report.refused > 0  # 33 threads


def test_nothing_that_is_not_clearly_faster_leads(program: Program) -> None:
    report = search(program, Clock(slab_global=-0.05))
    assert report.best.changes == {}


def test_every_token_count_of_the_class_is_timed(program: Program) -> None:
    clock = Clock()
    search(program, clock)
    for options in {options for options, _ in clock.asked}:
        assert [t for o, t in clock.asked if o == options] == [1, 2]


def test_equal_texts_are_timed_once(program: Program) -> None:
    clock = Clock()
    report = search(program, clock)
    texts = [run_pipeline(program, options).source.split("// model:")[1] for options, _ in clock.asked[::2]]
    assert len(texts) == len(set(texts)) == len(report.trials)


def test_what_the_user_fixed_stays(program: Program) -> None:
    clock = Clock(threads_64=-3.0)
    report = search(program, clock, Options(fuse="pre", threads=128))
    assert {options.threads for options, _ in clock.asked} == {128}
    assert "threads" not in report.best.changes


def test_a_candidate_with_wrong_bits_is_never_timed(program: Program) -> None:
    class Broken(Dry):
        def load(self, plan: Plan) -> Module:
            if plan.options.threads != 64:
                return super().load(plan)
            store = "= mix_comb[1 - 1];"
            assert store in plan.source
            return Module(plan, HostRunner(plan, source=plan.source.replace(store, "= mix_comb[1 - 1] * 1.5f;")))

    clock = Clock(threads_64=-5.0)
    report = search(program, clock, device=Broken())
    assert all(options.threads != 64 for options, _ in clock.asked)
    assert "threads" not in report.best.changes
    (wrong,) = [trial for trial in report.trials if trial.error]
    assert "bytes differ from the unfused emission" in wrong.error
    assert f"not timed: {wrong}: " in report.table()


def test_a_schedule_as_asked_for_that_cannot_run_ends_the_search(program: Program) -> None:
    def timer(*_: Any) -> float:
        raise Unmeasurable("no such device")

    with pytest.raises(CheckFailed) as caught:
        tune(program, ASKED, (1,), Dry(), timer=timer)
    assert caught.value.code == "C-TUNE"
    with pytest.raises(RefusedError):
        tune(program, Options(fuse="pre", threads=33), (1,), Dry())


@pytest.mark.parametrize("tokens", [(), (0,), (1, 257)])
def test_token_counts_are_of_one_class(program: Program, tokens: tuple[int, ...]) -> None:
    with pytest.raises((UsageError, ValueError)):
        tune(program, ASKED, tokens, Dry())


# ---- what is kept -------------------------------------------------------------------------------------------
def test_the_winner_is_used_where_it_was_found(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    search(program, Clock(slab_global=-2.0))
    options, why = tuned.resolve(program, ASKED, GPU)
    assert options == Options(fuse="pre", slab="global")
    assert why.step == "tune"
    assert why.choice == "slab global"
    assert "T = 1: 9.00 us against 11.00, T = 2: 10.00 us against 12.00" in why.because
    monkeypatch.setattr(tuned, "current_gpu", lambda: GPU)
    plan = mhcgen.compile(program, "pre", tuned=True)
    assert plan.kernels == mhcgen.compile(program, "pre", slab="global").kernels
    assert plan.log[0] == why
    assert mhcgen.compile(program, "pre").log == run_pipeline(program, ASKED).log


@pytest.mark.parametrize(
    "change",
    [{"fuse": "none"}, {"arch": "sm_100"}, {"regime": "prefill"}, {"threads": 128}, {"sync": "block"}],
)
def test_another_request_is_another_entry(program: Program, change: dict[str, Any]) -> None:
    search(program, Clock(slab_global=-2.0))
    assert tuned.find(GPU, program, ASKED) is not None
    asked = Options(**{**vars(ASKED), **change})
    assert tuned.find(GPU, program, asked) is None
    assert tuned.resolve(program, asked, GPU)[0] == asked


def test_another_program_or_gpu_is_another_entry(program: Program) -> None:
    search(program, Clock(slab_global=-2.0))
    assert tuned.find("NVIDIA H200", program, ASKED) is None
    for other in ({"hidden": 256}, {"streams": 3}, {"iters": 3}, {"dtype": "fp16"}, {"early_stop": True}):
        changed = build(**{**SMALL, **other})
        assert tuned.find(GPU, changed, ASKED) is None, other


def test_the_twin_and_the_stamps_use_the_same_entry(program: Program) -> None:
    search(program, Clock(slab_global=-2.0))
    for change in ({"stamps": True}, {"scalar": True}):
        options, _ = tuned.resolve(program, Options(fuse="pre", **change), GPU)
        assert options == Options(fuse="pre", slab="global", **change)


def test_a_prefill_count_is_kept_for_the_class_prefill(program: Program) -> None:
    search(program, Clock(threads_128=-2.0), tokens=(300,))
    assert tuned.find(GPU, program, ASKED) is None
    assert tuned.find(GPU, program, Options(fuse="pre", regime="prefill")) is not None


def test_nothing_is_kept_where_that_was_not_wanted(program: Program) -> None:
    report = search(program, Clock(slab_global=-2.0), keep=False)
    assert report.kept == ""
    assert tuned.find(GPU, program, ASKED) is None


def test_a_second_search_replaces_the_first(program: Program) -> None:
    search(program, Clock(slab_global=-2.0))
    search(program, Clock(threads_64=-2.0))
    found = tuned.find(GPU, program, ASKED)
    assert found is not None
    assert found.changes == {"threads": 64}
    assert len([entry for entry in cache.entries() if entry.suffix == tuned.SUFFIX]) == 1


def entry(own_cache: Path) -> Path:
    (path,) = own_cache.rglob(f"*{tuned.SUFFIX}")
    return path


@pytest.mark.parametrize("damage", ["truncated", "emptied", "changed"])
def test_a_damaged_entry_is_no_entry(program: Program, own_cache: Path, damage: str) -> None:
    search(program, Clock(slab_global=-2.0))
    path = entry(own_cache)
    text = path.read_bytes()
    path.write_bytes({"truncated": text[:-9], "emptied": b"", "changed": text.replace(b"global", b"shared")}[damage])
    assert tuned.find(GPU, program, ASKED) is None
    options, why = tuned.resolve(program, ASKED, GPU)
    assert options == ASKED
    assert why.because == f"nothing was tuned for this configuration in class decode on {GPU}"


@pytest.mark.parametrize(
    "change",
    [
        {"format": "mhcgen-tuned-0"}, {"gpu": "another"}, {"changes": {"fuse": "none"}}, {"changes": 7},
        {"changes": {"slab": "moon"}}, {"changes": {"threads": "64"}}, {"changes": {"threads": True}},
        {"us": ["fast"]}, {"tokens": [1]}, {"extra": 1},
    ],
)
def test_an_entry_that_makes_no_sense_is_no_entry(program: Program, change: dict[str, Any]) -> None:
    """Even under the right name: another version may have written it."""
    sound = {
        "format": tuned.FORMAT, "gpu": GPU, "changes": {"slab": "global"}, "tokens": [1, 2], "us": [1.0, 2.0],
        "default_us": [2.0, 3.0], "date": "2026-01-01",
    }
    key = tuned.key_of(GPU, program, ASKED)
    cache.store(key, tuned.SUFFIX, json.dumps({**sound, **change}).encode())
    assert tuned.find(GPU, program, ASKED) is None
    cache.clear()
    cache.store(key, tuned.SUFFIX, json.dumps(sound).encode())
    assert tuned.find(GPU, program, ASKED) is not None


def test_a_kept_schedule_that_is_refused_is_not_used(program: Program) -> None:
    tuned.store(program, ASKED, Tuned(GPU, {"threads": 33}, (1,), (1.0,), (2.0,), "2026-01-01"))
    options, why = tuned.resolve(program, ASKED, GPU)
    assert options == ASKED
    assert why.because.startswith("the tuned schedule (threads 33) is not legal: ")


def test_without_a_gpu_the_schedule_is_as_asked_for(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "current_gpu", lambda: "")
    options, why = tuned.resolve(program, ASKED)
    assert options == ASKED
    assert why == Decision(
        "tune", "schedule", "as asked for", "no GPU can be used here, so none has been tuned for"
    )


# ---- the verbs ----------------------------------------------------------------------------------------------
def test_verbs_search_and_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from mhcgen import tune as tune_module
    from mhcgen.bench import run

    monkeypatch.setattr(run, "gpu", Dry)
    monkeypatch.setattr(tuned, "current_gpu", lambda: GPU)
    monkeypatch.setattr(tune_module, "PASSES", 1)
    words = ["--streams", "2", "--hidden", "64", "--iters", "2", "--fuse", "pre", "--slab", "global"]
    fixed = ["--threads", "64", "--cluster", "1", "--placement", "row", "--mix-warp", "shared"]
    assert cli.run(["tune", *words, *fixed, "--tokens", "1,300"]) == 0
    out = capsys.readouterr().out
    assert "class decode: as asked for, kept in " in out
    assert "class prefill: as asked for, kept in " in out
    assert cli.run(["explain", *words, *fixed, "--tuned"]) == 0
    assert f"tune: schedule: the schedule as asked for; because measured on {GPU}" in capsys.readouterr().out
    assert cli.run(["explain", *words, "--tuned"]) == 0
    assert "nothing was tuned for this configuration in class decode" in capsys.readouterr().out
    assert cli.run(["explain", *words]) == 0
    assert "tune:" not in capsys.readouterr().out
