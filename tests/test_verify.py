"""Each rule of the verifiers has the smallest Program or Plan that breaks it, and all violations come together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import factories
import pytest

import mhcgen
from mhcgen import verify, verify_plan
from mhcgen.errors import ProgramError
from mhcgen.ir import Program, Stage, Tensor
from mhcgen.log import Hazard
from mhcgen.plan import Buffer, Columns, Kernel, Node, Plan, Step, Sync

MEAN = factories.program()
CHAIN = factories.program(*factories.chain())


def retensor(program: Program, name: str, **changes: object) -> Program:
    """The Program with fields of one tensor replaced."""
    return replace(
        program,
        tensors=tuple(replace(t, **changes) if t.name == name else t for t in program.tensors),  # type: ignore[arg-type]
    )


def restage(program: Program, name: str, **changes: object) -> Program:
    """The Program with fields of one stage replaced."""
    return program.with_stages(
        replace(s, **changes) if s.name == name else s  # type: ignore[arg-type]
        for s in program.stages
    )


def double(stage: Stage) -> Stage:
    return replace(stage, results=(("y", "y"),))


#: rule -> Programs that break it, each with the sentences expected of that rule
BROKEN: dict[str, list[tuple[Program, list[str]]]] = {
    "names_are_unique": [
        (replace(MEAN, stages=MEAN.stages * 2), ["stage mean is defined twice"]),
        (replace(MEAN, tensors=(*MEAN.tensors, MEAN.tensors[0])), ["tensor x is defined twice"]),
    ],
    "every_stage_matches_its_kind": [
        (restage(MEAN, "mean", kind="median"), ["stage mean has unknown kind median"]),
        (restage(MEAN, "mean", operands=()), ["stage mean (mean) lacks operand x"]),
        (restage(MEAN, "mean", results=()), ["stage mean (mean) lacks result y"]),
        (
            restage(MEAN, "mean", operands=(("x", "x"), ("z", "x"))),
            ["stage mean (mean) has unknown operand z"],
        ),
        (
            restage(MEAN, "mean", results=(("y", "y"), ("z", "y"))),
            ["stage mean (mean) has unknown result z"],
        ),
        (
            restage(MEAN, "mean", attrs=(("speed", 9),)),
            ["stage mean (mean) has unknown attribute speed"],
        ),
        (
            restage(CHAIN, "rowsq", attrs=(("acc", "fp64"),)),
            ["stage rowsq (rowsq) lacks attribute eps"],
        ),
    ],
    "sizes_are_given": [
        (
            replace(MEAN, dims=()),
            ["size n is None, not a positive integer", "size H is None, not a positive integer"],
        ),
        (replace(MEAN, dims=(("H", 8), ("n", 0))), ["size n is 0, not a positive integer"]),
        (replace(MEAN, dims=(("H", True), ("n", 1))), ["size H is True, not a positive integer"]),
        (replace(MEAN, dims=(("H", 8), ("K", 17), ("n", 2))), ["size K is 17, and 16 follows from the others"]),
        (
            replace(factories.program(factories.stage("quant")), dims=(("G", 2), ("H", 8), ("n", 2))),
            ["size G is 2, and 1 follows from the others"],
        ),
        (
            replace(factories.program(factories.stage("gated_mean")), dims=(("H", 8), ("K", 16), ("n", 2))),
            ["size D is None, not a positive integer"],
        ),
        (
            replace(
                factories.program(factories.stage("low_rank_gates")), dims=(("D", 3), ("H", 8), ("R", 4), ("n", 2))
            ),
            ["size R is 4, and 5 follows from the others"],
        ),
    ],
    "names_can_stand_in_text": [
        (
            factories.program(factories.stage("norm", operands={"weight": name})),
            [f"tensor {name} has a name that the emitted text uses for something else"],
        )
        for name in ("cs", "ws", "float", "lane", "tokens", "s_norm_part", "mhc_sum", "threadIdx")
    ]
    + [
        (
            factories.program(factories.stage("mean", operands={"x": name})),
            [f"tensor {name!r} is not made of letters, digits, single underscores and dots"],
        )
        for name in ("x y", "", "a__b", "_x", "x;", "x.", "ü")
    ]
    + [
        (
            factories.program(factories.stage("mean", "a-b")),
            ["stage 'a-b' is not made of letters, digits, single underscores and dots"],
        ),
        (
            factories.program(factories.stage("mean", results={"y": "x_t"})),
            ["tensors x and x_t would both be x_t in the emitted text"],
        ),
        (
            factories.program(
                factories.stage("mean", results={"y": "a.y"}), factories.stage("mean", "b", {}, {"y": "a_y"})
            ),
            [f"tensors a.y and a_y would both be {text} in the emitted text" for text in ("a_y", "a_y_t", "a_y_c")],
        ),
    ],
    "attributes_have_legal_values": [
        (
            factories.program(factories.stage(kind, usual=(), **{key: value})),
            [f"stage {kind} ({kind}): {key} is {value!r}, and must be {wanted}"],
        )
        for kind, key, value, wanted in (
            ("rowsq", "acc", "fp16", "fp32 or fp64"),
            ("rowsq", "eps", -1e-6, "a number >= 0 that fp32 can hold"),
            ("rowsq", "eps", float("nan"), "a number >= 0 that fp32 can hold"),
            ("rowsq", "eps", 1e-50, "a number >= 0 that fp32 can hold"),
            ("rowsq", "eps", "1e-6", "a number >= 0 that fp32 can hold"),
            ("gates", "pre_eps", 1e39, "a number >= 0 that fp32 can hold"),
            ("gates", "post_mult", float("inf"), "a finite number"),
            ("sinkhorn", "iters", 0, "a positive integer"),
            ("sinkhorn", "iters", 2.0, "a positive integer"),
            ("sinkhorn", "early_stop", 1, "a bool"),
            ("quant", "group", 48, "a power of two from 8 on"),
            ("quant", "group", 4, "a power of two from 8 on"),
            ("quant", "scheme", "int4", "q8 or fp8"),
            ("quant", "pow2", 0, "a bool"),
            ("project", "method", "external", "fma"),
        )
    ],
    "every_matrix_is_of_a_kind": [
        (
            factories.program(factories.stage("comb"), factories.stage("comb", "b", {}, {"comb": "c"}, comb="nine")),
            ["stage b has unknown comb 'nine'"],
        ),
        (
            factories.program(factories.stage("comb", comb="sinkhorn")),
            ["stage comb: comb sinkhorn is made by stages of kind sinkhorn, not comb"],
        ),
        (
            factories.program(factories.stage("comb", comb="kronecker"), n=3),
            [
                "stage comb: comb kronecker: a Kronecker product of 2 x 2 matrices has 2^k rows, "
                "and 3 is no power of two"
            ],
        ),
        (
            factories.program(
                factories.stage("comb"), factories.stage("comb", "b", {}, {"comb": "c"}, comb="circulant")
            ),
            ["stage b: comb circulant takes 2 logits, and L = 4"],
        ),
        (factories.program(factories.stage("comb", usual=())), ["stage comb: comb plain takes 4 logits at n = 2"]),
    ],
    "what_runs_once_reads_no_token": [
        (
            retensor(factories.program(factories.stage("comb")), "comb", shape=("n", "n")),
            ["stage comb makes comb for all tokens, and logits is one token's"],
        ),
        (
            retensor(factories.program(factories.stage("comb")), "logits", shape=("L",)),
            ["stage comb makes a matrix a token of logits, which is the same for all tokens"],
        ),
    ],
    "every_operand_is_declared": [
        (replace(MEAN, tensors=MEAN.tensors[1:]), ["stage mean mentions undeclared tensor x"]),
        (replace(MEAN, tensors=MEAN.tensors[:1]), ["stage mean mentions undeclared tensor y"]),
    ],
    "every_tensor_has_one_writer": [
        (retensor(MEAN, "y", role="input"), ["input y is written by mean"]),
        (retensor(MEAN, "x", role="value"), ["value x has 0 writers (none)"]),
        (
            replace(MEAN, stages=(*MEAN.stages, factories.stage("mean", "again"))),
            ["result y has 2 writers (mean, again)"],
        ),
    ],
    "every_value_is_used": [
        (
            replace(MEAN, tensors=(*MEAN.tensors, Tensor("spare", ("T",), "fp32", "input"))),
            ["input spare is never read"],
        ),
        (retensor(MEAN, "y", role="value"), ["value y is never read"]),
    ],
    "shapes_agree_with_the_kinds": [
        (
            retensor(MEAN, "x", shape=("T", "H")),
            ["stage mean: x is x of shape ('T', 8), and kind mean wants ('T', 2, 8)"],
        ),
        (
            retensor(MEAN, "y", shape=("T", "H", 1)),
            ["stage mean: y is y of shape ('T', 8, 1), and kind mean wants ('T', 8)"],
        ),
        (
            retensor(MEAN, "y", shape=("T", "W")),
            ["stage mean: y is y of shape ('T', '?W'), and kind mean wants ('T', 8)"],
        ),
    ],
    "dtypes_and_roles_are_known": [
        (retensor(MEAN, "x", dtype="fp12"), ["tensor x has unknown dtype fp12"]),
        (retensor(MEAN, "y", role="leftover"), ["tensor y has unknown role leftover"]),
    ],
    "dtypes_fit_the_slots": [
        (
            factories.program(factories.stage("expand"), dtypes={"e": "bf16"}),
            ["stage expand: expand copies, so its dtypes cannot be bf16 and fp32"],
        ),
        (
            retensor(CHAIN, "mixes", dtype="bf16"),
            ["stage rowsq: mixes is mixes of dtype bf16, and only fp32 fits there"],
        ),
        (
            retensor(MEAN, "x", dtype="int32"),
            ["stage mean: x is x of dtype int32, and only fp32, bf16 or fp16 fits there"],
        ),
        (
            retensor(factories.program(factories.stage("quant")), "q", dtype="fp8_e4m3"),
            ["stage quant: q is q of dtype fp8_e4m3, and only int8 fits there"],
        ),
    ],
    "stages_are_in_a_topological_order": [
        (
            CHAIN.with_stages(CHAIN.stages[::-1]),
            [
                "stage collapse reads pre before gates writes it",
                "stage sinkhorn reads logits before gates writes it",
                "stage gates reads mixes_scaled before rowsq writes it",
            ],
        ),
        (restage(MEAN, "mean", operands=(("x", "y"),)), ["stage mean reads y before mean writes it"]),
    ],
    "tokens_are_counted": [
        (
            factories.program(factories.stage("comb", usual=(), comb="identity")),
            ["no input has a token axis T"],
        ),
    ],
    "a_program_has_results": [
        (replace(MEAN, stages=()), ["the Program has no stage"]),
        (retensor(MEAN, "y", role="value"), ["the Program has no result"]),
    ],
}


def test_every_rule_has_a_program_that_breaks_it() -> None:
    assert set(BROKEN) == {rule.__name__ for rule in verify.RULES}


@pytest.mark.parametrize(("rule", "index"), [(rule, i) for rule, found in BROKEN.items() for i in range(len(found))])
def test_rule_says(rule: str, index: int) -> None:
    program, sentences = BROKEN[rule][index]
    said = [text for text in verify.violations(program) if text.startswith(f"{rule}: ")]
    assert said == [f"{rule}: {sentence}" for sentence in sentences]


def test_a_valid_program_breaks_none() -> None:
    for program in (MEAN, CHAIN, mhcgen.build(hidden=64, scope="boundary", extra=("engram", "tap"))):
        assert verify.violations(program) == []
        verify.verify(program)


def test_all_violations_are_reported_together() -> None:
    broken = retensor(retensor(restage(CHAIN, "collapse", kind="collar"), "x", dtype="fp12"), "y", role="value")
    with pytest.raises(ProgramError) as caught:
        verify.verify(broken)
    rules = {note.split(":")[0] for note in caught.value.notes}
    assert {"every_stage_matches_its_kind", "dtypes_and_roles_are_known", "every_value_is_used"} <= rules
    assert caught.value.code == "V-PROGRAM"
    assert f"breaks {len(caught.value.notes)} rule(s)" in caught.value.message


def test_the_pipeline_verifies_what_it_is_given() -> None:
    with pytest.raises(ProgramError, match="V-PROGRAM"):
        mhcgen.compile(retensor(MEAN, "x", dtype="fp12"))


# ---- plans ------------------------------------------------------------------------------------------
GOOD = mhcgen.compile(mhcgen.build(streams=2, hidden=64), "pre", placement="shared")


def rekernel(**changes: object) -> Plan:
    return GOOD.with_kernel(0, replace(GOOD.kernels[0], **changes))  # type: ignore[arg-type]


def without_barriers() -> Plan:
    bare = tuple(node for node in GOOD.kernels[0].body if not isinstance(node, Sync))
    return rekernel(body=bare)


def with_barrier(barrier: Sync) -> Plan:
    return rekernel(body=(*GOOD.kernels[0].body, barrier))


def is_step(node: Node, template: str) -> bool:
    return isinstance(node, Step) and node.template == template


def dependent(edit: Callable[[tuple[Node, ...]], tuple[Node, ...]]) -> Plan:
    """A Plan for dependent launch with another body."""
    made = mhcgen.compile(GOOD.program, "pre", dependent=True)
    return made.with_kernel(0, replace(made.kernels[0], body=edit(made.kernels[0].body)))


def on_a_cluster(edit: Callable[[tuple[Node, ...]], tuple[Node, ...]]) -> Plan:
    """A Plan for a cluster of blocks with another body."""
    made = mhcgen.compile(mhcgen.build(hidden=1024, projection="fma"), "pre", cluster=4)
    return made.with_kernel(0, replace(made.kernels[0], body=edit(made.kernels[0].body)))


CLUSTER = "mhc_project_rowsq_gates_sinkhorn_collapse"
WORK = next(step for step in GOOD.kernels[0].steps() if step.name == "collapse.columns")
NAME = "mhc_rowsq_gates_sinkhorn_collapse"
HAZARD = Hazard("RAW", "s_pre", "a", "b", "block")
#: rule -> Plans that break it, each with one sentence expected of that rule
BROKEN_PLANS: dict[str, list[tuple[Plan, str]]] = {
    "every_stage_has_one_kernel": [
        (replace(GOOD, kernels=()), "stage rowsq is in 0 kernels"),
        (replace(GOOD, kernels=(*GOOD.kernels, Kernel("k", ("gates",)))), "stage gates is in 2 kernels"),
    ],
    "kernel_names_are_unique": [
        (replace(GOOD, kernels=GOOD.kernels * 2), f"kernel {NAME} is defined twice"),
    ],
    "every_touched_tensor_has_a_place": [
        (rekernel(places=()), f"{NAME}: x has no place"),
    ],
    "threads_own_every_column": [
        (rekernel(columns=Columns(3, 1, 1)), f"{NAME}: run 3, chunk 1 and vector 1 do not nest in H = 64"),
        (rekernel(columns=Columns(8, 8, 16)), f"{NAME}: run 8, chunk 8 and vector 16 do not nest in H = 64"),
        (rekernel(columns=Columns(1, 1, 1), data_warps=1), f"{NAME}: 1 warps of run 1 do not cover H = 64"),
    ],
    "buffers_are_declared": [
        (rekernel(buffers=()), f"{NAME}: buffer s_pre is not declared"),
        (
            rekernel(buffers=(*GOOD.kernels[0].buffers, Buffer("s_spare", "float", 1))),
            f"{NAME}: buffer s_spare is never used",
        ),
    ],
    "nothing_of_a_predecessor_is_read_before_the_wait": [
        (
            dependent(lambda body: tuple(n for n in body if not is_step(n, "dependent_wait"))),
            f"{NAME}: dependent launch and its wait do not come as a pair",
        ),
        (
            dependent(lambda body: (replace(WORK, constant=False), *body)),
            f"{NAME}: collapse.columns runs before the wait and is not bound to parameters",
        ),
    ],
    "nothing_is_sent_before_every_block_has_started": [
        (
            on_a_cluster(lambda body: tuple(n for n in body if not is_step(n, "cluster_wait"))),
            f"{CLUSTER}: the arrival of its blocks and the wait for it do not come as a pair",
        ),
        (
            on_a_cluster(lambda body: tuple(sorted(body, key=lambda node: is_step(node, "cluster_wait")))),
            f"{CLUSTER}: project.dots sends before every block has started",
        ),
    ],
    "no_hazard_is_bare": [
        (
            without_barriers(),
            f"{NAME}: RAW s_pre: gates.strided -> collapse.columns needs a block barrier and has none",
        ),
        (
            on_a_cluster(lambda body: tuple(n for n in body if not (isinstance(n, Sync) and n.team == "gate"))),
            f"{CLUSTER}: RAW s_mixes_ranks: project.dots -> gates.pre needs a wait for what is sent and has none",
        ),
        (
            on_a_cluster(lambda body: (*body, next(n for n in body if is_step(n, "cluster_project_dots")))),
            f"{CLUSTER}: WAR s_mixes_ranks: gates.pre -> project.dots needs a cluster barrier and has none",
        ),
    ],
    "every_barrier_has_a_reason": [
        (with_barrier(Sync("warp", "mix", ())), f"{NAME}: a warp barrier has no hazard"),
        (
            with_barrier(Sync("warp", "mix", (HAZARD,))),
            f"{NAME}: RAW s_pre: a -> b needs block, the barrier is warp",
        ),
    ],
}


def test_every_plan_rule_has_a_plan_that_breaks_it() -> None:
    rules = {rule.__name__ for found in verify_plan.RULES.values() for rule in found}
    assert set(BROKEN_PLANS) == rules


@pytest.mark.parametrize(
    ("rule", "index"), [(rule, i) for rule, found in BROKEN_PLANS.items() for i in range(len(found))]
)
def test_plan_rule_says(rule: str, index: int) -> None:
    plan, sentence = BROKEN_PLANS[rule][index]
    assert f"{rule}: {sentence}" in verify_plan.plan_violations(plan)
    with pytest.raises(ProgramError) as caught:
        verify_plan.verify_plan(plan)
    assert caught.value.code == "V-PLAN"
    assert set(caught.value.notes) == set(verify_plan.plan_violations(plan))


def test_a_finished_plan_breaks_no_rule() -> None:
    assert verify_plan.plan_violations(GOOD) == []


def test_rules_hold_only_after_their_pass() -> None:
    early = replace(without_barriers(), done=("fuse", "place"))
    assert verify_plan.plan_violations(early) == []


def test_every_pass_has_its_rules() -> None:
    from mhcgen.passes import PIPELINE

    assert set(verify_plan.RULES) == {name for name, _ in PIPELINE}
