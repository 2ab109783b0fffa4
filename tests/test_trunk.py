"""Trunks: their Programs, presets by site, and six sites from a checkpoint against unfused and reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trunks
from trunks import SITES, stage_branches, turned

import mhcgen
from mhcgen import reference
from mhcgen.bounds import compare_all
from mhcgen.build import build_config
from mhcgen.errors import ProgramError, RefusedError, UsageError
from mhcgen.ir import Program
from mhcgen.module import HyperConnections
from mhcgen.trunk import site_names
from mhcgen.verify import verify
from mhcgen.weights import trunk_parameters

FUSIONS = ("seed", "pre", "boundary")
#: streams, hidden size, exit: every n, both exits, a hidden size with a short vector among them
SHAPES = [(2, 8, "mean"), (3, 12, "head"), (4, 16, "head"), (4, 7, "mean")]


def groups(program: Program, fuse: str) -> list[tuple[str, ...]]:
    """Stages of each kernel that holds more than one."""
    return [
        kernel.stages
        for kernel in mhcgen.compile(program, fuse=fuse, stop_after="fuse").kernels
        if len(kernel.stages) > 1
    ]


def small(scope: str, **options: Any) -> Program:
    return mhcgen.build(**{"streams": 3, "hidden": 8, "scope": scope, **options})


# ---- Programs -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("streams", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("exit", ["mean", "head"])
def test_a_trunk_names_its_sites_and_shapes_its_parameters(streams: int, exit: str) -> None:
    program = small("trunk", streams=streams, layers=2, exit=exit)
    rows, wide = (2 + streams) * streams, streams * 8
    wanted = {}
    for site in site_names(2):
        wanted |= {f"{site}.fn": (rows, wide), f"{site}.scale": (3,), f"{site}.base": (rows,)}
    if exit == "head":
        wanted |= {"head.fn": (streams, wide), "head.scale": (1,), "head.base": (streams,)}
    assert {t.name: program.shape(t.name, 5) for t in program.of_role("parameter")} == wanted
    assert [t.name for t in program.of_role("input")] == ["e"]
    assert [t.name for t in program.of_role("result")] == ["y"]
    assert [s.name for s in program.stages_of_kind("branch")] == [f"{site}.branch" for site in site_names(2)]


def test_the_residual_of_a_site_is_what_the_site_read() -> None:
    program = small("trunk", layers=1)
    assert program.stage("0.attn.post").operand("x") == "x"
    assert program.stage("0.ffn.post").operand("x") == "0.attn.x_next" == program.stage("0.ffn.rowsq").operand("x")
    assert program.stage("head.collapse").operand("x") == "0.ffn.x_next"


def test_a_trunk_projects_for_itself() -> None:
    assert small("trunk").arithmetic.projection == "fma"
    with pytest.raises(UsageError) as caught:
        small("trunk", projection="external")
    assert caught.value.code == "U-PROJECTION"


@pytest.mark.parametrize(("field", "value"), [("layers", 0), ("layers", 1025), ("layers", True), ("exit", "last")])
def test_layers_and_exit_are_checked(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=field):
        small("trunk", **{field: value})


@pytest.mark.parametrize(
    ("scope", "stages", "given", "results"),
    [
        ("expand", ["expand"], {"e"}, ["x"]),
        ("mean", ["mean"], {"x"}, ["y"]),
        ("post", ["post"], {"x", "f", "post", "comb"}, ["x_next"]),
        ("head", ["rowsq", "gates", "collapse"], {"x", "mixes", "scale", "base"}, ["pre", "y"]),
    ],
)
def test_parts_of_the_module_are_programs(scope: str, stages: list[str], given: set[str], results: list[str]) -> None:
    program = small(scope)
    assert [stage.name for stage in program.stages] == stages
    assert {tensor.name for tensor in program.of_role("input", "parameter")} == given
    assert [tensor.name for tensor in program.of_role("result")] == results


def test_a_head_projects_n_rows() -> None:
    program = small("head", projection="fma")
    assert program.shape("fn", 1) == (3, 24) and program.shape("mixes", 5) == (5, 3)


@pytest.mark.parametrize("dim", ["R", "n"])
def test_the_rows_of_a_projection_are_those_of_what_reads_them(dim: str) -> None:
    program = small("head", projection="fma")
    wrong = [replace(t, shape=("T", dim)) if t.name == "mixes" else t for t in program.tensors]
    if dim == "n":
        verify(program.with_stages(program.stages, wrong))
        return
    with pytest.raises(ProgramError) as caught:
        verify(program.with_stages(program.stages, wrong))
    assert any("mixes" in note and "wants" in note for note in caught.value.notes)


# ---- presets ------------------------------------------------------------------------------------------------
def named(site: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{site}.{name}" for name in names)


CHAIN = ("project", "rowsq", "gates", "sinkhorn", "collapse")


def test_pre_makes_one_group_a_site_and_one_of_the_head() -> None:
    wanted = [named(site, *CHAIN) for site in site_names(2)]
    assert groups(small("trunk", layers=2), "pre") == [
        *wanted,
        named("head", "project", "rowsq", "gates", "collapse"),
    ]
    assert groups(small("trunk", layers=2, exit="mean"), "pre") == wanted


def test_pre_norm_quant_fuses_each_sites_tail() -> None:
    program = small("trunk", layers=1, norm=True, quant="q8", exit="mean")
    assert groups(program, "pre-norm") == [named(site, *CHAIN, "norm") for site in site_names(1)]
    assert groups(program, "pre-norm-quant") == [named(site, *CHAIN, "norm", "quant") for site in site_names(1)]


def test_seed_leaves_three_launches_after_the_projection() -> None:
    program = small("trunk", layers=1, exit="mean")
    assert groups(program, "seed") == [named(site, "gates", "sinkhorn") for site in site_names(1)]
    assert len(mhcgen.compile(program, fuse="seed").kernels) == 1 + 2 * 5 + 1


@pytest.mark.parametrize(
    ("exit", "last"), [("mean", ("exit.mean",)), ("head", named("head", "project", "rowsq", "gates", "collapse"))]
)
def test_boundary_joins_post_with_the_next_sites_chain(exit: str, last: tuple[str, ...]) -> None:
    assert groups(small("trunk", layers=1, exit=exit), "boundary") == [
        named("0.attn", *CHAIN),
        ("0.attn.post", *named("0.ffn", *CHAIN)),
        ("0.ffn.post", *last),
    ]


def test_delayed_joins_post_with_the_next_collapse() -> None:
    program = small("trunk", layers=1, exit="mean")
    with pytest.raises(RefusedError) as caught:  # the pre gates of this model are made from the new streams
        groups(program, "delayed")
    assert caught.value.code == "F-ESCAPE" and "0.ffn.gates" in caught.value.notes[0]


def test_site_is_refused_with_the_branch_as_witness() -> None:
    with pytest.raises(RefusedError) as caught:
        groups(small("trunk"), "site")
    assert caught.value.code == "F-ESCAPE" and "0.attn.branch" in caught.value.notes[0]


def test_an_engram_or_a_tap_between_sites_refuses_the_boundary() -> None:
    with pytest.raises(RefusedError) as caught:
        groups(small("trunk", extra=("engram",)), "boundary")
    assert caught.value.code == "F-ESCAPE" and "0.attn.engram" in caught.value.notes[0]
    with pytest.raises(RefusedError) as caught:
        groups(small("trunk", extra=("tap",)), "boundary")
    assert caught.value.code == "F-TAP" and "0.attn.post -> 0.attn.tap" in caught.value.notes[0]
    assert groups(small("trunk", extra=("engram",)), "pre")


@pytest.mark.parametrize(("scope", "fuse"), [("post", "pre"), ("mean", "boundary"), ("trunk", "pre-norm")])
def test_a_preset_without_its_kinds_is_refused(scope: str, fuse: str) -> None:
    with pytest.raises(RefusedError) as caught:
        groups(small(scope), fuse)
    assert caught.value.code == "F-PRESET"


def test_kernels_name_a_site_once() -> None:
    names = [kernel.name for kernel in mhcgen.compile(small("trunk"), fuse="boundary").kernels]
    assert names == [
        "mhc_expand",
        "mhc_0_attn_project_rowsq_gates_sinkhorn_collapse",
        "mhc_0_attn_post_0_ffn_project_rowsq_gates_sinkhorn_collapse",
        "mhc_0_ffn_post_head_project_rowsq_gates_collapse",
    ]


def test_presets_of_one_site_are_as_they_were() -> None:
    assert groups(small("boundary", projection="fma"), "boundary") == [("post", *CHAIN)]
    assert groups(small("pre"), "pre") == [("rowsq", "gates", "sinkhorn", "collapse")]
    assert groups(small("head", projection="fma"), "pre") == [("project", "rowsq", "gates", "collapse")]


# ---- six sites from a checkpoint ----------------------------------------------------------------------------
def run(program: Program, fuse: str, given: dict[str, Any], backend: str = "host") -> dict[str, Any]:
    """Result and every intermediate tensor that unfused and fused kernels both leave in memory."""
    module = mhcgen.compile(program, fuse=fuse).load(backend=backend)
    out = {t.name: module.runner.empty(program.shape(t.name, len(given["e"])), t.dtype) for t in module.outputs}
    branches = {}
    for name, branch in stage_branches().items():

        def noted(z: Any, branch: Any = branch, f: str = name.replace("branch", "f")) -> Any:
            out[f] = branch(z)
            return out[f]

        branches[name] = noted
    written = {stage.result("f") for stage in program.stages_of_kind("branch")}
    result = module(**given, branches=branches, out={k: v for k, v in out.items() if k not in written})
    for launch in module.launches:
        launch.report.raise_if_found()
    assert set(module.counts.values()) == ({0} if not len(given["e"]) else {1}), "each kernel ran once"
    return {**out, **result}


@pytest.fixture(scope="module", params=SHAPES, ids=lambda p: f"n{p[0]}-H{p[1]}-{p[2]}")
def trunk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Program, dict[str, Any]]:
    where = trunks.topology(*request.param)
    path = trunks.checkpoint(tmp_path_factory.mktemp("trunk") / "model.safetensors", where)
    parameters = trunk_parameters(path, where.layers, where.streams, where.hidden, exit=where.exit)
    return where, trunks.program(where), dict(parameters)


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_every_fusion_of_six_sites_has_the_bits_of_the_unfused(trunk: Any, tokens: int) -> None:
    where, program, parameters = trunk
    given = {"e": trunks.embeddings(where, tokens), **parameters}
    plain = run(program, "none", given)
    assert plain["y"].shape == (tokens, where.hidden)
    for fuse in FUSIONS:
        fused = run(program, fuse, given)
        assert "5.ffn.x_next" not in fused and "2.attn.x_next" in fused
        for name, array in fused.items():
            if name in plain:
                assert array.tobytes() == plain[name].tobytes(), (fuse, name)


def outside(where: Any, parameters: dict[str, Any], got: dict[str, Any], **options: Any) -> list[str]:
    """Tensors of a trunk that are not within the bound of their site.

    Each site is compared with the reference of that site alone, given the streams that the emission itself had
    there: the bound is `mhcgen.error_model`'s for one site, element by element. Carried through six sites it would
    be of no use: it takes every rounding to be at its worst and every sum to be of one sign, which multiplies it by
    ten or more a site, where real errors hardly grow.
    """
    rounded = options.get("dtype", "fp32") != "fp32"
    bad = []
    x = "x"
    exits = ("head", "head") if where.exit == "head" else ("exit", "mean")
    for site, scope in (*((site, "site") for site in SITES), exits):
        norm = {} if scope == "site" else {"norm": False}
        alone = build_config(where.config(**{"scope": scope, "projection": "fma", **options, **norm}))
        given = {t.name: parameters[f"{site}.{t.name}"] for t in alone.of_role("parameter")} | {"x": got[x]}
        told = {"branch": lambda z, site=site: got[f"{site}.f"]}
        values = reference.run(alone, given, told, all_values=True, round_values=rounded)
        have = {t.name: got[f"{site}.{t.name}"] for t in alone.of_role("result") if f"{site}.{t.name}" in got}
        have |= {} if scope == "site" else {"y": got["y"]}
        bad += [f"{site}.{c.name}" for c in compare_all(alone, have, values, given, rounded=rounded) if not c.ok]
        x = f"{site}.x_next"
    return bad


def band(program: Program, given: dict[str, Any], values: dict[str, Any]) -> np.ndarray[Any, Any]:
    """How far y may be from the reference's, by token: 8 times what moving every value by one rounding does.

    The control is the reference itself with each result of each stage moved by up to 2^-24 of itself, four times
    over. It knows how this trunk magnifies small changes, and nothing of the emission. A stage rounds a handful of
    times, not once, and four draws do not find the worst: hence 8.
    """
    worst = np.zeros(len(values["y"]))
    for seed in range(4):
        random = np.random.default_rng(seed)
        moved = {t.name: np.asarray(given[t.name], np.float64) for t in program.of_role("input", "parameter")}
        for stage in program.stages:
            operands = {slot: moved[name] for slot, name in stage.operands}
            made = reference.evaluate(stage, operands, dict(program.dims), stage_branches().get(stage.name))
            for slot, name in stage.results:
                exact = np.asarray(made[slot], np.float64)
                moved[name] = exact * (1.0 + 2.0**-24 * random.uniform(-1, 1, exact.shape))
        worst = np.maximum(worst, np.abs(moved["y"] - values["y"]).max(axis=1))
    return 8.0 * worst


def test_each_of_six_sites_agrees_with_the_reference_within_the_bound(trunk: Any) -> None:
    where, program, parameters = trunk
    got = run(program, "none", {"e": trunks.embeddings(where, 5), **parameters})
    assert outside(where, parameters, got) == []


def test_the_trunk_agrees_with_the_reference_from_end_to_end(trunk: Any) -> None:
    where, program, parameters = trunk
    given = {"e": trunks.embeddings(where, 5), **parameters}
    got = run(program, "boundary", given)
    values = reference.run(program, given, stage_branches(), all_values=True)
    allowed = band(program, given, values)
    assert np.all(np.abs(got["y"] - values["y"]).max(axis=1) <= allowed)
    assert np.all(allowed < 1e-4 * np.abs(values["y"]).max(axis=1)), "a band that wide would prove nothing"


FAULTS = ("sites swapped", "eps swapped", "a branch skipped", "iteration short", "layer residual")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_trunk_is_outside_the_band(trunk: Any, fault: str) -> None:
    where, program, parameters = trunk
    given = {"e": trunks.embeddings(where, 5), **parameters}
    other, branches, wrong = program, stage_branches(), dict(given)
    if fault == "sites swapped":
        for part in ("fn", "base", "scale"):
            wrong[f"0.attn.{part}"], wrong[f"0.ffn.{part}"] = given[f"0.ffn.{part}"], given[f"0.attn.{part}"]
    elif fault == "eps swapped":
        other = trunks.program(where, rms_eps=where.hc_eps, hc_eps=where.rms_eps)
    elif fault == "a branch skipped":
        branches["2.ffn.branch"] = lambda z: z * 0.0
    elif fault == "iteration short":
        other = trunks.program(where, iters=3)
    else:
        stages = [
            replace(s, operands=tuple((k, "x" if k == "x" else v) for k, v in s.operands))
            if s.name == "0.ffn.post"
            else s
            for s in program.stages
        ]
        other = program.with_stages(stages)
    values = reference.run(program, given, stage_branches(), all_values=True)
    got = reference.run(other, wrong, branches)
    assert np.any(np.abs(got["y"] - values["y"]).max(axis=1) > band(program, given, values))


@pytest.mark.parametrize("fault", ["comb transposed", "stream skipped"])
def test_a_faulty_site_is_outside_its_bound(trunk: Any, fault: str) -> None:
    where, program, parameters = trunk
    if fault == "comb transposed" and where.streams == 2:
        pytest.skip("a 2 x 2 doubly stochastic matrix is symmetric")
    got = run(program, "none", {"e": trunks.embeddings(where, 5), **parameters})
    comb = got["1.attn.comb"].astype(np.float64)
    comb = np.swapaxes(comb, 1, 2) if fault == "comb transposed" else comb * (np.arange(where.streams) > 0)[:, None]
    x_next = reference.post(got["0.ffn.x_next"], got["1.attn.f"], got["1.attn.post"], comb)
    assert outside(where, parameters, {**got, "1.attn.x_next": x_next.astype(np.float32)})[:1] == ["1.attn.x_next"]


# ---- other arithmetic, other schedules ----------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_streams_fuse_to_the_same_bits(tmp_path: Path, dtype: str) -> None:
    where = trunks.topology(3, 16, "head")
    path = trunks.checkpoint(tmp_path / "model.safetensors", where)
    program = trunks.program(where, dtype=dtype)
    parameters = trunk_parameters(path, where.layers, where.streams, where.hidden, exit="head")
    given = {"e": trunks.embeddings(where, 3, dtype=dtype), **parameters}
    plain, fused = (run(program, fuse, given) for fuse in ("none", "boundary"))
    assert plain["y"].tobytes() == fused["y"].tobytes()
    assert outside(where, parameters, plain, dtype=dtype) == []


def test_norms_of_the_sub_layers_come_from_the_checkpoint(tmp_path: Path) -> None:
    where = trunks.topology(4, 16, "mean")
    path = trunks.checkpoint(tmp_path / "model.safetensors", where)
    program = trunks.program(where, norm=True)
    parameters = trunk_parameters(path, where.layers, where.streams, where.hidden, exit="mean", norm=True)
    given = {"e": trunks.embeddings(where, 3), **parameters}
    plain, fused = (run(program, fuse, given) for fuse in ("none", "pre-norm"))
    assert plain["y"].tobytes() == fused["y"].tobytes()
    assert outside(where, parameters, plain, norm=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("threads", [64, 256])
@pytest.mark.parametrize("placement", ["shared", "row", "element"])
def test_schedules_of_a_trunk_do_not_change_a_bit(tmp_path: Path, placement: str, threads: int) -> None:
    where = trunks.topology(4, 48, "head")
    path = trunks.checkpoint(tmp_path / "model.safetensors", where)
    parameters = trunk_parameters(path, where.layers, where.streams, where.hidden, exit="head")
    given = {"e": trunks.embeddings(where, 2), **parameters}
    program = trunks.program(where)
    plain = run(program, "none", given)["y"]
    module = mhcgen.compile(program, fuse="boundary", placement=placement, threads=threads).load(backend="host")
    assert module(**given, branches=stage_branches())["y"].tobytes() == plain.tobytes()


@pytest.mark.parametrize(("fuse", "exit"), [("pre", "head"), ("boundary", "head"), ("boundary", "mean")])
def test_the_race_checker_finds_nothing_in_a_trunk(tmp_path: Path, fuse: str, exit: str) -> None:
    where = trunks.topology(3, 40, exit, layers=1)
    path = trunks.checkpoint(tmp_path / "model.safetensors", where)
    parameters = trunk_parameters(path, 1, where.streams, where.hidden, exit=exit)
    module = mhcgen.compile(trunks.program(where), fuse=fuse, threads=64).load(backend="host", race=True)
    module(e=trunks.embeddings(where, 2), **parameters, branches=stage_branches(SITES[:2]))
    assert len(module.launches) == len(module.plan.kernels)
    for launch in module.launches:
        assert launch.report.raise_if_found().unwritten and not any(launch.report.unwritten.values())


@pytest.mark.gpu
@pytest.mark.parametrize("fuse", ["none", *FUSIONS])
def test_six_sites_on_a_gpu_have_the_bits_of_the_host(trunk: Any, fuse: str) -> None:
    from mhcgen.backends.cuda import to_device, to_host

    where, program, parameters = trunk
    given = {"e": trunks.embeddings(where, 5), **parameters}
    module = mhcgen.compile(program, fuse=fuse).load(backend="cuda")
    got = module(**{name: to_device(array) for name, array in given.items()}, branches=stage_branches())
    assert to_host(got["y"]).tobytes() == run(program, fuse, given)["y"].tobytes()


def test_the_module_has_the_bits_of_the_program(trunk: Any) -> None:
    """Both views of a trunk: one Program with every site in it, and one emission an arm with parameters put in."""
    where, program, parameters = trunk
    embeddings = trunks.embeddings(where, 5)
    wanted = run(program, "none", {"e": embeddings, **parameters})["y"]
    hyper = HyperConnections(where, backend="host", fuse="boundary").load(parameters)
    assert hyper.run(embeddings, turned).tobytes() == wanted.tobytes()
