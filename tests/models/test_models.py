"""Every model at its legal stream counts: unfused within the bound of the reference, every schedule bit-equal.

The default run takes a sample of the matrix that has every model, stream count, width and dtype in it. The whole
matrix is `make matrix` (marker slow).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import factories
import numpy as np
import pytest

import mhcgen
from mhcgen import reference
from mhcgen.build import MAX_STREAMS
from mhcgen.combs import comb_kind
from mhcgen.errors import RefusedError, UsageError
from mhcgen.formulas import formulas
from mhcgen.gate import Request, run
from mhcgen.inputs import DISCRIMINATING, discriminating
from mhcgen.models import MODELS, Model
from mhcgen.plan import Options
from mhcgen.stages import COMB_STAGES

STREAMS = (1, 2, 3, 4, 5, 8, 16)
HIDDEN = (1, 7, 64, 257)
DTYPES = ("fp32", "bf16", "fp16")
#: Schedules of every config, as patterns, since some are not legal everywhere.
ARMS = "see?,v2,v3.shared.12?,v3.row.12?,v3.element.12?,v3.registers.12?,v4.aut?,scalar,group.*"
#: Schedules of the sample: the ones that differ most.
FEW_ARMS = "see?,v3.row.12?,v3.element.12?,v3.registers.12?,scala?"

Cell = tuple[str, int, int, str]


def cells() -> Iterator[Cell]:
    """The whole matrix."""
    for name, model in MODELS.items():
        for n, hidden, dtype in itertools.product(STREAMS, HIDDEN, DTYPES):
            if not model.refuses_streams(n):
                yield name, n, hidden, dtype


def sample() -> list[Cell]:
    """One cell a model; streams, widths and dtypes go round in periods that share no factor."""
    found = []
    for index, (name, model) in enumerate(MODELS.items()):
        legal = [n for n in STREAMS if not model.refuses_streams(n)]
        found.append((name, legal[(3 + index) % len(legal)], HIDDEN[(1 + index) % 4], DTYPES[index % 3]))
    return found


def gate(cell: Cell, arms: str, *, tokens: tuple[int, ...] = (3,), race: bool = False, **options: Any) -> None:
    name, n, hidden, dtype = cell
    fuse = options.pop("fuse", "pre")
    config = mhcgen.configure(name, streams=n, hidden=hidden, dtype=dtype, **options)
    report = run(Request(config, Options(fuse=fuse), tokens=tokens, backend="host", arms=arms, race=race))
    assert report.exit_code == 0, report.table()


def label(cell: Cell) -> str:
    return "-".join(map(str, cell))


# --- the matrix ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", sample(), ids=label)
def test_a_sample_of_the_matrix(cell: Cell) -> None:
    gate(cell, FEW_ARMS, projection="fma")


#: Half a minute in race mode.
LARGE = [cell for cell in sample() if cell[1] * cell[2] > 2000]


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=[pytest.mark.slow] * (cell in LARGE)) for cell in sample()[1::3]], ids=label
)
def test_a_sample_in_race_mode(cell: Cell) -> None:
    gate(cell, "", race=True, projection="fma", norm=True, fuse="pre-norm")


@pytest.mark.parametrize("cell", sample()[2::3], ids=label)
def test_a_sample_of_boundaries(cell: Cell) -> None:
    gate(cell, "", scope="boundary", projection="fma", norm=True, fuse="boundary")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n", "hidden"), list(dict.fromkeys(cell[:3] for cell in cells())))
def test_the_matrix(name: str, n: int, hidden: int) -> None:
    """`make matrix`: its README entry says how long it takes."""
    for dtype in DTYPES:
        cell = (name, n, hidden, dtype)
        gate(cell, ARMS, tokens=(1, 3), projection="fma")
        gate(cell, "", tokens=(2,), scope="boundary", projection="fma", norm=True, fuse="boundary")
        gate(cell, "", tokens=(2,), race=True, projection="fma", norm=True, fuse="pre-norm")
    gate((name, n, hidden, "bf16"), ARMS, tokens=(1, 3))


def test_the_sample_has_everything_in_it() -> None:
    found = sample()
    assert [cell[0] for cell in found] == list(MODELS)
    assert {cell[1] for cell in found} == set(STREAMS)
    assert {cell[2] for cell in found} == set(HIDDEN)
    assert {cell[3] for cell in found} == set(DTYPES)


# --- what a model states ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_illegal_stream_counts_name_the_legal_ones(model: Model) -> None:
    legal = model.legal_streams(MAX_STREAMS)
    assert legal
    for n in set(range(1, MAX_STREAMS + 1)) - set(legal):
        with pytest.raises(UsageError) as caught:
            mhcgen.build(model.name, streams=n, hidden=8)
        assert caught.value.code == "U-STREAMS"
        assert caught.value.hints == (f"use one of {', '.join(map(str, legal))}",)


def test_the_models_with_few_stream_counts() -> None:
    assert MODELS["kromhc"].legal_streams(MAX_STREAMS) == (1, 2, 4, 8, 16)
    assert MODELS["mhc-lite"].legal_streams(MAX_STREAMS) == (1, 2, 3, 4, 5)
    with pytest.raises(UsageError, match="6! = 720 permutations"):
        mhcgen.build("mhc-lite", streams=6, hidden=8)


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_parameter_shapes_follow_from_the_model(model: Model) -> None:
    n = min(model.legal_streams(4)[-1], 4)
    program = mhcgen.build(model.name, streams=n, hidden=8, projection="fma")
    shapes = {t.name: program.shape(t.name, 1) for t in program.of_role("parameter")}
    if model.rank:
        assert shapes == {"stream_weight": (n * 8,), "fn": (1 + n, n * 8), "up": (1, n * 8)}
        return
    if model.static == "all":
        assert shapes == {"base": (model.mixes(n),)}
        return
    fn = (2 + n, 8) if model.norm_each else (model.mixes(n), n * 8)
    static = {"comb_logits": (model.logits(n),)} if model.static == "comb" else {}
    assert shapes == {"fn": fn, "scale": (3,), "base": (model.mixes(n),), **static}


def test_mix_counts() -> None:
    counts = {name: MODELS[name].mixes(4) for name in MODELS}
    assert counts["deepseek-v4"] == 24
    assert counts["mhc-lite"] == 4 + 4 + 24
    assert counts["kromhc"] == 4 + 4 + 4
    assert counts["ihc"] == 8 and counts["dhc"] == counts["circulant-hc"] == 12
    assert counts["static-mhc"] == 8
    assert MODELS["gated-residual"].mixes(4, MODELS["gated-residual"].rank_at(2560)) == 320 + 4


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_a_model_prints_its_formula_and_source(model: Model) -> None:
    n = model.legal_streams(4)[-1]
    text = formulas(mhcgen.build(model.name, streams=n, hidden=8, projection="fma"))
    assert model.source in text
    for word in ("collapse", "gates", "comb"):
        assert word in text
    assert not any(mark in text for mark in ("None", "{{", "<function"))


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_models_differ_in_class(model: Model) -> None:
    """No two models are the same arithmetic under two names, at their own constants."""
    n = 4

    def digest(name: str) -> str:
        return mhcgen.build(name, streams=n, hidden=8, projection="fma").numeric_class.digest

    # GLM-5.3-Flash and DeepSeek-V4 differ in their eps alone.
    assert [name for name in MODELS if digest(name) == digest(model.name)] == [model.name]


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_options_without_a_meaning_are_refused(model: Model) -> None:
    n = model.legal_streams(4)[-1]
    if not model.uses_hc_eps:
        with pytest.raises(UsageError, match="has no hc_eps"):
            mhcgen.build(model.name, streams=n, hidden=8, hc_eps=1e-3)
    if not model.rank:
        with pytest.raises(UsageError, match="no gates of low rank"):
            mhcgen.build(model.name, streams=n, hidden=8, rank=2)
    if not model.iterated:
        with pytest.raises(UsageError, match="without iterations"):
            mhcgen.build(model.name, streams=n, hidden=8, iters=5)
        with pytest.raises(UsageError, match="without iterations"):
            mhcgen.build(model.name, streams=n, hidden=8, iterations_out=True)
    if not model.delayed_pre:
        with pytest.raises(UsageError, match="exit pre"):
            mhcgen.build(model.name, streams=n, hidden=8, scope="trunk", exit="pre")


# --- inputs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_an_asymmetric_matrix_is_aimed_at_where_the_kind_has_one(model: Model) -> None:
    n = 4
    program = mhcgen.build(model.name, streams=n, hidden=8)
    given = discriminating(program, 3, "D1")
    (stage,) = program.stages_of_kind(*COMB_STAGES)
    if comb_kind(stage).aim(n, 1) is None:
        assert given is None
        return
    assert given is not None
    comb = reference.run(program, given)["comb"].reshape(-1, n, n)[0]
    assert np.max(np.abs(comb - comb.T)) > 0.9


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
@pytest.mark.parametrize("kind", DISCRIMINATING)
def test_inputs_are_in_the_memory_order_of_the_program(model: Model, kind: str) -> None:
    program = mhcgen.build(model.name, streams=4, hidden=6)
    given = discriminating(program, 2, kind)
    for tensor in program.of_role("input", "parameter") if given is not None else ():
        assert given is not None and given[tensor.name].shape == program.shape(tensor.name, 2)
        assert given[tensor.name].flags.c_contiguous


# --- single models ------------------------------------------------------------------------------------------


def test_stream_last_memory_is_the_transpose_and_nothing_else() -> None:
    """TransformerEngine's streams [T, H, n] give what the same numbers as [T, n, H] give."""
    last = mhcgen.build("transformer-engine", streams=3, hidden=10, projection="fma", scope="boundary")
    tensors = tuple(
        mhcgen.ir.Tensor(t.name, ("T", "n", "H"), t.dtype, t.role) if t.shape == ("T", "H", "n") else t
        for t in last.tensors
    )
    first = last.with_stages(last.stages, tensors)
    given = factories.inputs(last, 4)
    turned = {**given, "x": np.ascontiguousarray(np.swapaxes(given["x"], 1, 2))}
    for fuse in ("none", "boundary"):
        ours = mhcgen.compile(last, fuse).load("host")(**given)
        theirs = mhcgen.compile(first, fuse).load("host")(**turned)
        for name, array in theirs.items():
            mine = np.swapaxes(ours[name], 1, 2) if name == "x_next" else ours[name]
            assert np.array_equal(mine, array), (fuse, name)


def test_delayed_pre_collapses_by_the_gates_of_the_boundary_before() -> None:
    program = mhcgen.build("deepseek-v4.1", streams=4, hidden=8, scope="boundary", projection="fma")
    assert program.stage("collapse").operand("pre") == "pre_prev"
    names = [stage.name for stage in program.stages]
    assert names.index("collapse") < names.index("project")
    plan = mhcgen.compile(program, "delayed")
    assert plan.kernels[0].stages == ("post", "collapse")
    gate(("deepseek-v4.1", 4, 7, "fp32"), "", scope="boundary", projection="fma", norm=True, fuse="delayed")


@pytest.mark.parametrize(("extra", "code", "path"), [("engram", "F-ESCAPE", 3), ("tap", "F-TAP", 2)])
@pytest.mark.parametrize("fuse", ["delayed", "boundary"])
def test_a_reader_of_the_streams_between_two_sites_refuses(extra: str, code: str, path: int, fuse: str) -> None:
    program = mhcgen.build("deepseek-v4.1", hidden=8, scope="boundary", projection="fma", extra=(extra,))
    with pytest.raises(RefusedError) as caught:
        mhcgen.compile(program, fuse)
    refusal: Any = caught.value.refusal
    assert refusal.code == code
    assert refusal.witness.path[:2] == ("post", extra) and len(refusal.witness.path) == path
    followed = mhcgen.compile(program, refusal.hint.split("--fuse ")[1])
    assert followed.kernels[0].stages == ("post",)


def test_the_trunk_of_a_delayed_model_starts_at_stream_0_and_ends_by_the_last_gates() -> None:
    program = mhcgen.build("deepseek-v4.1", streams=2, hidden=6, scope="trunk", layers=2)
    assert program.stage("0.attn.first").operand("x") == "x"
    assert program.stage("0.ffn.collapse").operand("pre") == "0.attn.pre"
    assert program.stage("1.attn.collapse").operand("pre") == "0.ffn.pre"
    assert program.stage("exit.collapse").operand("pre") == "1.ffn.pre"
    given, branches = factories.inputs(program, 3), factories.branches(program)
    want = mhcgen.compile(program).load("host")(branches=branches, **given)["y"]
    have = mhcgen.compile(program, "boundary").load("host")(branches=branches, **given)["y"]
    assert np.array_equal(want, have)


@pytest.mark.parametrize("name", ["static-mhc", "mhc.cu-static"])
def test_a_static_matrix_is_made_once_whatever_the_token_count(name: str) -> None:
    program = mhcgen.build(name, streams=4, hidden=8, projection="fma")
    module = mhcgen.compile(program).load("host")
    found = [module(**factories.inputs(program, tokens))["comb"] for tokens in (0, 1, 5)]
    assert found[0].shape == (4, 4)
    assert all(np.array_equal(found[0], comb) for comb in found[1:])
    assert all(launch.grid == (1, 1) for launch in module.launches if launch.kernel == "mhc_sinkhorn")


def test_what_runs_once_is_not_fused_with_what_runs_once_a_token() -> None:
    program = mhcgen.build("static-mhc", hidden=8)
    with pytest.raises(RefusedError) as caught:
        mhcgen.compile(program, "gates+sinkhorn")
    assert caught.value.code == "F-STATIC"
    assert [kernel.stages for kernel in mhcgen.compile(program, "pre").kernels] == [
        ("rowsq", "gates", "collapse"), ("sinkhorn",),
    ]  # fmt: skip


def test_plain_hyper_connections_by_their_own_formula() -> None:
    """alpha_j = tanh(norm(x_j) W_a) s_a + A_j and beta_j likewise, written out stream by stream."""
    program = mhcgen.build("plain-hc", streams=3, hidden=6, projection="fma")
    given = {name: array.astype(np.float64) for name, array in factories.inputs(program, 2).items()}
    made = reference.run(program, given)
    scale, base = given["scale"], given["base"]
    for t, j in itertools.product(range(2), range(3)):
        stream = given["x"][t, j]
        normed = stream / np.sqrt(np.mean(stream**2) + 1e-6)
        alpha = np.tanh(given["fn"] @ normed)
        assert np.isclose(made["pre"][t, j], alpha[0] * scale[0] + base[j])
        assert np.isclose(made["post"][t, j], alpha[1] * scale[1] + base[3 + j])
        assert np.allclose(made["comb"][t, j], alpha[2:] * scale[2] + base[6 + 3 * j : 9 + 3 * j])


def test_the_gated_residual_by_its_own_formula() -> None:
    """As the published module has it: down, silu, up and sigmoid of the flat normed streams, element by element."""
    n, hidden, rank = 3, 6, 2
    program = mhcgen.build("gated-residual", streams=n, hidden=hidden, rank=rank, projection="fma", scope="site")
    given = {name: array.astype(np.float64) for name, array in factories.inputs(program, 2).items()}
    made = reference.run(program, given, {"branch": lambda z: 0.5 * z})
    down, inject = given["fn"][:rank], given["fn"][rank:]
    for t in range(2):
        z = given["x"][t] / np.sqrt(np.mean(given["x"][t] ** 2, axis=1, keepdims=True) + 1e-6)
        flat = z.reshape(-1) * (1.0 + given["stream_weight"])
        low = down @ flat / n
        low = low / (1.0 + np.exp(-low))
        gate = 1.0 / (1.0 + np.exp(-(given["up"].T @ low)))
        y = np.mean((gate * flat).reshape(n, hidden), axis=0)
        post = 2.0 / (1.0 + np.exp(-(inject @ flat) / n))
        assert np.allclose(made["y"][t], y) and np.allclose(made["post"][t], post)
        assert np.allclose(made["x_next"][t], given["x"][t] + post[:, None] * y / 2)


def test_the_head_of_the_gated_residual_is_its_mixer_without_post() -> None:
    options: dict[str, Any] = {"streams": 3, "hidden": 6, "rank": 2, "projection": "fma"}
    head, site = (mhcgen.build("gated-residual", scope=scope, **options) for scope in ("head", "pre"))
    assert head.stage("gates").kind == "head_low_rank_gates" and head.shape("fn", 1) == (2, 18)
    given = factories.inputs(site, 2)
    narrow = {**given, "fn": np.ascontiguousarray(given["fn"][:2])}
    for fuse in ("none", "pre"):
        whole = mhcgen.compile(site, fuse).load("host")(**given)["y"]
        assert np.array_equal(mhcgen.compile(head, fuse).load("host")(**narrow)["y"], whole)


def test_what_the_gated_residual_does_not_have() -> None:
    program = mhcgen.build("gated-residual", hidden=1024, projection="fma")
    with pytest.raises(RefusedError) as caught:
        mhcgen.compile(program, "pre", cluster=4)
    assert caught.value.code == "P-CLUSTER" and "gates of every element" in caught.value.message
    assert any("gates of every element" in str(entry) for entry in mhcgen.compile(program, "pre").log)
    assert not any("gates of every element" in str(entry) for entry in mhcgen.compile(program).log)
    with pytest.raises(RefusedError, match="F-ESCAPE"):
        mhcgen.compile(program, "norm_streams+collapse")
    with pytest.raises(RefusedError, match="L-SHARED"):
        mhcgen.compile(mhcgen.build("gated-residual", hidden=1024, rank=4096, projection="fma"), "pre")
    boundary = mhcgen.build("gated-residual", hidden=64, projection="fma", scope="boundary")
    with pytest.raises(RefusedError, match="F-ESCAPE"):
        mhcgen.compile(boundary, "delayed")


def test_the_default_rank_is_an_eighth_of_the_width_up_to_the_published_one() -> None:
    ranks = {hidden: mhcgen.configure("gated-residual", hidden=hidden).rank for hidden in (1, 7, 64, 2560, 7168)}
    assert ranks == {1: 1, 7: 1, 64: 8, 2560: 320, 7168: 320}
    assert mhcgen.configure("gated-residual", hidden=64, rank=99).rank == 99
    for rank in (0, 4097, 1.5):
        with pytest.raises(UsageError, match="rank must be an integer from 1 to 4096"):
            mhcgen.configure("gated-residual", rank=rank)


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("deepseek-v4", lambda m, k: np.sqrt(m + 1e-6)),
        ("megatron", lambda m, k: np.sqrt(m) + 1e-6),
        ("tileops", lambda m, k: np.sqrt(m) + 1e-4),
        ("mhc-lite", lambda m, k: np.maximum(np.sqrt(m * k), 1e-12) / np.sqrt(k)),
    ],
)
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-14])
def test_where_the_eps_of_the_rms_stands(name: str, root: Any, size: float) -> None:
    program = mhcgen.build(name, streams=2, hidden=4)
    given = {**factories.inputs(program, 1), "x": np.full((1, 2, 4), np.float32(size))}
    stage = program.stages[0]
    mean = float(np.float32(size)) ** 2
    scaled = reference.run(program, given, all_values=True)[stage.result("mixes_scaled")]
    assert np.allclose(scaled, given["mixes"].astype(np.float64) / root(mean, 8), rtol=1e-12)
    emitted = mhcgen.compile(program).load("host")
    out = {stage.result("mixes_scaled"): np.empty(scaled.shape, np.float32)}
    emitted(out=out, **given)
    assert np.allclose(out[stage.result("mixes_scaled")], scaled, rtol=3e-7)
