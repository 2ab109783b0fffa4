"""HyperConnections: arms, exact rows, exits, engagement, warm-up, refusals."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trunks
from trunks import SITES, turned

from mhcgen import compile, reference
from mhcgen.build import build_config
from mhcgen.errors import InputError, InputTypeError, InternalError, LaunchError, UsageError
from mhcgen.inputs import uniform
from mhcgen.module import FUSES, HyperConnections
from mhcgen.topology import Topology
from mhcgen.weights import trunk_parameters

WHERE = trunks.topology(3, 12, "head")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trunks.checkpoint(tmp_path_factory.mktemp("module") / "model.safetensors", WHERE)


@pytest.fixture(scope="module")
def hyper(path: Path) -> HyperConnections:
    return HyperConnections(WHERE, backend="host", fuse="pre").load(path)


def streams(tokens: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return uniform("streams", seed, (tokens, WHERE.streams, WHERE.hidden))


def same(a: Any, b: Any) -> bool:
    return all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in ("y", "pre", "post", "comb"))


def test_from_a_configuration_and_a_checkpoint_to_the_exit(tmp_path: Path, path: Path) -> None:
    config = {
        "model_type": "deepseek_v4",
        "hc_mult": WHERE.streams,
        "hc_sinkhorn_iters": WHERE.iters,
        "hc_eps": WHERE.hc_eps,
        "rms_norm_eps": WHERE.rms_eps,
        "hidden_size": WHERE.hidden,
        "num_hidden_layers": WHERE.layers,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    hyper = HyperConnections.from_config(tmp_path / "config.json", backend="host").load(path)
    assert hyper.topology == WHERE and hyper.fuse == "seed"
    given = {"e": trunks.embeddings(WHERE, 2), **trunk_parameters(path, 3, 3, 12, exit="head")}
    wanted = reference.run(trunks.program(WHERE), given, trunks.stage_branches())["y"]
    np.testing.assert_allclose(hyper.run(given["e"], turned), wanted, rtol=0, atol=1e-5)


def test_a_serial_configuration_says_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="no hyper-connections here") as caught:
        HyperConnections.from_config(tmp_path / "config.json")
    assert caught.value.code == "I-SERIAL"


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("fuse", FUSES)
def test_every_fusion_runs_the_trunk_to_the_same_bits(path: Path, fuse: str, tokens: int) -> None:
    norm = fuse == "pre-norm"
    hyper = HyperConnections(WHERE, backend="host", fuse=fuse, norm=norm).load(path)
    plain = HyperConnections(WHERE, backend="host", fuse="none", norm=norm).load(path)
    embeddings = trunks.embeddings(WHERE, tokens)
    got = hyper.run(embeddings, turned)
    assert got.shape == (tokens, WHERE.hidden)
    assert (
        got.tobytes()
        == plain.run(embeddings, {site: lambda z, site=site: turned(site, z) for site in SITES}).tobytes()
    )


# ---- arms ---------------------------------------------------------------------------------------------------
def test_a_rows_bits_do_not_depend_on_the_batch(hyper: HyperConnections) -> None:
    x = streams(5)
    whole, exact = hyper.pre("1.attn", x), hyper.pre_exact("1.attn", x)
    assert same(whole, exact)
    for row in range(5):
        alone = hyper.pre("1.attn", np.ascontiguousarray(x[row : row + 1]))
        for name in ("y", "pre", "post", "comb"):
            assert getattr(alone, name).tobytes() == getattr(whole, name)[row : row + 1].tobytes(), name


def test_finish_is_pre_with_the_mixes_given(hyper: HyperConnections) -> None:
    x = streams(4)
    program = build_config(WHERE.config(scope="pre", projection="fma"))
    parameters = {name: hyper.parameters[f"2.ffn.{name}"] for name in ("fn", "scale", "base")}
    module = compile(program).load(backend="host")
    mixes = module.runner.empty((4, WHERE.rows), "fp32")
    module(x=x, **parameters, out={"mixes": mixes})
    assert same(hyper.finish("2.ffn", x, mixes), hyper.pre("2.ffn", x))


def test_a_callers_gemm_projects_and_pre_exact_calls_it_by_the_row(path: Path) -> None:
    calls: list[int] = []

    def gemm(x: Any, fn: Any) -> Any:
        """Another sum for every T, as vendor libraries have."""
        calls.append(len(x))
        parts = np.array_split(np.arange(x.shape[1]), len(x))
        return sum((x[:, part] @ fn[:, part].T for part in parts), np.float32(0.0))

    hyper = HyperConnections(WHERE, backend="host", fuse="pre", gemm=gemm).load(path)
    assert "pre" not in hyper.modules
    x = streams(4)
    batch, exact = hyper.pre("0.attn", x), hyper.pre_exact("0.attn", x)
    assert calls == [4, 1, 1, 1, 1]
    assert not same(batch, exact), "the GEMM here varies with T, or this test shows nothing"
    for row in range(4):
        alone = hyper.pre("0.attn", np.ascontiguousarray(x[row : row + 1]))
        assert alone.comb.tobytes() == exact.comb[row : row + 1].tobytes()
        assert alone.y.tobytes() == exact.y[row : row + 1].tobytes()
    calls.clear()
    y = hyper.run(trunks.embeddings(WHERE, 2), turned)
    assert calls == [2] * 7, "six sites and the head"
    own = HyperConnections(WHERE, backend="host", fuse="pre").load(path).run(trunks.embeddings(WHERE, 2), turned)
    np.testing.assert_allclose(y, own, rtol=0, atol=1e-5)
    assert hyper.counts["finish"] == 6 + 1 + 4 and hyper.counts["pre_exact"] == 1


def test_post_mixes_the_streams_of_its_own_site(hyper: HyperConnections) -> None:
    x, f = streams(3), uniform("f", 0, (3, WHERE.hidden))
    made = hyper.pre("0.attn", x)
    got = hyper.post(f, x, made)
    np.testing.assert_allclose(got, reference.post(x, f, made.post, made.comb), rtol=0, atol=1e-5)
    # Each source stream goes where comb's row says: comb is (from_stream, to_stream).
    one = np.zeros_like(x)
    one[:, 1] = 1.0
    alone = hyper.post(np.zeros_like(f), one, made)
    np.testing.assert_allclose(alone, np.broadcast_to(made.comb[:, 1, :, None], alone.shape), rtol=1e-6)


def test_a_boundary_is_post_and_the_next_pre(path: Path, hyper: HyperConnections) -> None:
    fused = HyperConnections(WHERE, backend="host", fuse="boundary").load(path)
    x, f = streams(3), uniform("f", 0, (3, WHERE.hidden))
    made = hyper.pre("0.attn", x)
    got, following = fused.boundary("0.ffn", f, x, made)
    wanted = hyper.post(f, x, made)
    assert got.tobytes() == wanted.tobytes() and same(following, hyper.pre("0.ffn", wanted))
    with pytest.raises(UsageError) as caught:
        hyper.boundary("0.ffn", f, x, made)
    assert caught.value.code == "U-ARM"


def test_exits(hyper: HyperConnections) -> None:
    x = streams(3)
    np.testing.assert_allclose(hyper.mean(x), x.mean(axis=1), rtol=0, atol=1e-6)
    p = {name: hyper.parameters[f"head.{name}"].astype(np.float64) for name in ("fn", "scale", "base")}
    mixes = reference.rowsq(x.astype(np.float64), reference.project(x.astype(np.float64), p["fn"]), WHERE.rms_eps)
    pre = reference.head_gates(mixes, p["scale"], p["base"], WHERE.hc_eps)
    np.testing.assert_allclose(hyper.exit(x), reference.collapse(x, pre), rtol=0, atol=1e-5)


def test_norm_is_part_of_what_a_branch_reads(path: Path) -> None:
    hyper = HyperConnections(WHERE, backend="host", fuse="pre-norm", norm=True).load(path)
    made = hyper.pre("0.attn", streams(2))
    assert made.branch_input is made.z
    weight = hyper.parameters["0.attn.norm_weight"]
    np.testing.assert_allclose(made.z, reference.norm(made.y.astype(float), weight, WHERE.norm_eps), rtol=1e-5)


def test_other_models_run_alike() -> None:
    """A model of another mixing matrix, other row counts and another exit: module and Program have the same bits."""
    from mhcgen import build
    from mhcgen.inputs import make_inputs

    where = Topology("mhc-lite", 3, 8, 1, 0, rms_eps=1e-6, hc_eps=0.0, norm_eps=1e-6, exit="sum")
    program = build("mhc-lite", streams=3, hidden=8, scope="trunk", layers=1)
    given = make_inputs(program, 2)
    sites = ("0.attn", "0.ffn")
    wanted = compile(program, fuse="pre").load(backend="host")(**given, branches=trunks.stage_branches(sites))
    embeddings = given.pop("e")
    hyper = HyperConnections(where, backend="host", fuse="pre").load(given, warm_up=False)
    assert hyper.run(embeddings, turned, hyper.workspace(2)).tobytes() == wanted["y"].tobytes()
    assert hyper.counts["sum"] == 1


@pytest.mark.parametrize("exit", ["head", "mean"])
@pytest.mark.parametrize(("fuse", "norm"), [("seed", False), ("pre", False), ("boundary", False), ("boundary", True)])
def test_a_model_with_gates_of_elements_runs_alike(fuse: str, norm: bool, exit: str, path: Path) -> None:
    """It has no pre gates, and other parameters at a site and at the head."""
    from mhcgen.inputs import make_inputs

    where = Topology("gated-residual", 3, 8, 1, 0, rms_eps=1e-6, hc_eps=0.0, norm_eps=1e-6, exit=exit, rank=5)
    program = build_config(where.config(scope="trunk", norm=norm))
    given = make_inputs(program, 2)
    branches = trunks.stage_branches(("0.attn", "0.ffn"))
    wanted = compile(program).load(backend="host")(**given, branches=branches)["y"]
    embeddings = given.pop("e")
    hyper = HyperConnections(where, backend="host", fuse=fuse, norm=norm)
    with pytest.raises(UsageError, match="no checkpoint is read"):
        hyper.load(path)
    hyper.load(given)
    assert hyper.run(embeddings, turned, hyper.workspace(2)).tobytes() == wanted.tobytes()
    x = streams(2)[:, :, :8].copy()
    made = hyper.pre("0.attn", x)
    assert made.pre is None and same_gated(made, hyper.pre_exact("0.attn", x))
    with pytest.raises(UsageError) as caught:
        HyperConnections(where, backend="host", gemm=lambda x, fn: x @ fn.T)
    assert caught.value.code == "U-MODEL"


def same_gated(a: Any, b: Any) -> bool:
    return all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in ("y", "post", "comb"))


@pytest.mark.parametrize(
    ("model", "options"), [("deepseek-v4.1", {}), ("transformer-engine", {"gemm": lambda x, fn: x @ fn.T})]
)
def test_models_it_does_not_run(model: str, options: dict[str, Any]) -> None:
    from mhcgen.models import MODELS

    where = Topology(**{**WHERE.__dict__, "model": model, "exit": MODELS[model].exit, "hc_eps": MODELS[model].hc_eps})
    with pytest.raises(UsageError) as caught:
        HyperConnections(where, backend="host", **options)
    assert caught.value.code == "U-MODEL" and model in caught.value.message


# ---- engagement ---------------------------------------------------------------------------------------------
def test_arms_are_counted_and_announced_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hyper = HyperConnections(WHERE, backend="host", fuse="boundary").load(path)
    assert not hyper.counts, "warm-up does not engage an arm"
    with caplog.at_level(logging.INFO, "mhcgen"):
        hyper.run(trunks.embeddings(WHERE, 2), turned)
        hyper.run(trunks.embeddings(WHERE, 2), turned)
        hyper.run(trunks.embeddings(WHERE, 0), turned)
    assert dict(hyper.counts) == {"expand": 2, "pre": 2, "boundary": 10, "post": 2, "head": 2}
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[1] for line in lines] == ["expand", "pre", "boundary", "post", "head"]
    (line,) = (line for line in lines if " boundary " in line)
    module = hyper.modules["boundary"]
    for part in ("fuse boundary", "n 3", "H 12", "T 2", "launches 1", "backend host", module.plan.kernels[0].name):
        assert part in line
    assert module.plan.emitted_sha256[:12] in line and str(module.plan.numeric_class) in line


# ---- warm-up ------------------------------------------------------------------------------------------------
def test_warm_up_reports_what_it_built(path: Path) -> None:
    hyper = HyperConnections(WHERE, backend="host", fuse="pre").load(path, warm_up=False)
    assert hyper.report is None
    report = hyper.warm_up()
    assert {b.arm for b in report.built} == {"expand", "pre", "finish", "post", "mean", "head"} == set(hyper.modules)
    assert [b.twin for b in report.built if b.arm == "pre"] == ["aligned", "misaligned"]
    text = str(report)
    assert text.startswith("warm-up: 12 emissions") and "pre (aligned): fuse pre, 1 kernels" in text


def test_after_warm_up_nothing_compiles(hyper: HyperConnections, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*args: Any, **options: Any) -> None:
        raise AssertionError("a call compiled")

    monkeypatch.setattr("mhcgen.backends.host.module.build", compiled)
    hyper.run(trunks.embeddings(WHERE, 2), turned)
    off = np.empty(2 * WHERE.streams * WHERE.hidden + 1, np.float32)[1:].reshape(2, WHERE.streams, WHERE.hidden)
    off[:] = streams(2)
    assert same(hyper.pre("0.attn", off), hyper.pre("0.attn", streams(2)))
    assert {launch.scalar for launch in hyper.modules["pre"].launches} == {False}


def test_a_warm_up_without_twins_refuses_what_would_compile(path: Path) -> None:
    hyper = HyperConnections(WHERE, backend="host", fuse="pre").load(path, warm_up=False)
    hyper.warm_up(twins=False)
    off = np.zeros(WHERE.streams * WHERE.hidden + 1, np.float32)[1:].reshape(1, WHERE.streams, WHERE.hidden)
    with pytest.raises(LaunchError) as caught:
        hyper.pre("0.attn", off)
    assert caught.value.code == "E-COLD"


@pytest.mark.parametrize("arms", [(), ("pre", "prologue")])
def test_a_warm_up_that_finds_nothing_is_an_error(hyper: HyperConnections, arms: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        hyper.warm_up(arms)
    assert caught.value.code == "U-ARM"


def test_a_warm_up_that_launched_other_kernels_is_an_error(
    hyper: HyperConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(hyper.modules["mean"]), "_launch", lambda *args: None)
    with pytest.raises(InternalError) as caught:
        hyper.warm_up(("mean",))
    assert caught.value.code == "X-WARM-UP"


# ---- refusals -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options", [{"fuse": "site"}, {"fuse": "rowsq+gates"}, {"fuse": "boundary", "gemm": lambda x, fn: x}]
)
def test_fusions_it_does_not_have(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        HyperConnections(WHERE, backend="host", **options)
    assert caught.value.code == "U-FUSE"


def test_pre_needs_loaded_parameters_and_a_known_site(hyper: HyperConnections) -> None:
    with pytest.raises(UsageError, match="no parameters of site") as caught:
        HyperConnections(WHERE, backend="host").pre("0.attn", streams(1))
    assert caught.value.hints == ("load(weights) first",)
    with pytest.raises(UsageError, match=r"9\.attn"):
        hyper.pre("9.attn", streams(1))


def test_a_site_without_a_branch_is_named(hyper: HyperConnections) -> None:
    with pytest.raises(InputError, match=r"0\.ffn") as caught:
        hyper.run(trunks.embeddings(WHERE, 1), {"0.attn": lambda z: z})
    assert caught.value.code == "I-BRANCH"


@pytest.mark.parametrize(
    ("branches", "where"),
    [
        ([lambda z: z], "branches"),
        (None, "branches"),
        ({**dict.fromkeys(SITES, lambda z: z), "0.ffn": 3}, "branches['0.ffn']"),
        ({**dict.fromkeys(SITES, lambda z: z), "9.attn": lambda z: z}, "branches['9.attn']"),
    ],
)
def test_branches_are_checked_before_anything_runs(hyper: HyperConnections, branches: Any, where: str) -> None:
    before = hyper.counts.copy()
    with pytest.raises(InputError) as caught:
        hyper.run(trunks.embeddings(WHERE, 1), branches)
    assert (caught.value.code, caught.value.where, hyper.counts) == ("I-BRANCH", where, before)
    assert where == "branches" or "0.attn" in caught.value.hints[0]


def test_arrays_are_checked_by_name(hyper: HyperConnections) -> None:
    x = streams(2)
    made = hyper.pre("0.attn", x)
    with pytest.raises(InputTypeError, match="f has dtype float64"):
        hyper.post(np.zeros((2, WHERE.hidden)), x, made)
    with pytest.raises(InputError, match="x has shape"):
        hyper.pre("0.attn", x[:, :2].copy())
    with pytest.raises(InputTypeError, match=r"e is a builtins\.list"):
        hyper.expand([1.0])
    with pytest.raises(InputError, match="f has 1 tokens"):
        hyper.post(np.zeros((1, WHERE.hidden), np.float32), x, made)


def test_a_mapping_of_parameters_is_checked(hyper: HyperConnections) -> None:
    parameters = dict(hyper.parameters)
    fresh = HyperConnections(WHERE, backend="host")
    for name, value, code in (
        ("0.attn.fn", None, "I-MISSING"),
        ("0.attn.bias", np.zeros(3, np.float32), "I-UNKNOWN"),
        ("0.attn.scale", np.zeros(4, np.float32), "I-SHAPE"),
        ("0.attn.scale", np.zeros(3), "I-SHAPE"),
    ):
        given = {**parameters, name: value}
        if value is None:
            del given[name]
        with pytest.raises(InputError, match=name) as caught:
            fresh.load(given, warm_up=False)
        assert caught.value.code == code


def test_a_checkpoint_for_another_trunk_is_refused(path: Path) -> None:
    other = Topology(**{**WHERE.__dict__, "layers": 4})
    with pytest.raises(InputError, match=r"layers\.3\.hc_attn_fn is missing"):
        HyperConnections(other, backend="host").load(path)
