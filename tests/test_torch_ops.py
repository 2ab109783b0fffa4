"""mhcgen.torch: operators as torch sees them, their paths on the CPU, and what they refuse."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'mhcgen[torch]'")

import torch
from torch_cases import CASES, IDS, PLAIN, SMALL, as_tuple, call, inputs, no_compiler

import mhcgen.torch as mhc
from mhcgen.api import compile
from mhcgen.errors import InputError, InputTypeError, MhcgenError, UsageError
from mhcgen.models import MODELS
from mhcgen.torch import OPERATIONS, Setup, operator
from mhcgen.torch.cpu import as_numpy, choice

BF16 = Setup("deepseek-v4", hidden=16, iters=3, dtype="bf16")
V41 = Setup("deepseek-v4.1", hidden=16, iters=3)
needs_executor = pytest.mark.skipif(bool(no_compiler()), reason=f"no CPU executor: {no_compiler()}")


def run(name: str, setup: Setup, tensors: list[Any]) -> tuple[torch.Tensor, ...]:
    return as_tuple(operator(name)(*tensors, setup.text))


# ---- registration ---------------------------------------------------------------------------------------
def test_every_operation_is_an_operator_and_a_function() -> None:
    registered = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names()
                  if name.startswith("mhcgen::")}  # fmt: skip
    assert registered == set(OPERATIONS) | {f"{name}_out" for name in OPERATIONS}
    for name in OPERATIONS:
        assert callable(getattr(mhc, name)) and name in mhc.__all__


@pytest.mark.parametrize(("name", "gemm"), CASES, ids=IDS)
def test_opcheck(name: str, gemm: bool) -> None:
    with mhc.use_path("torch"):
        for grad in (False, True):
            tensors = inputs(name, gemm=gemm, grad=grad)
            torch.library.opcheck(operator(name), (*tensors, SMALL.text))
        tensors = inputs(name, gemm=gemm)
        made = run(name, SMALL, tensors)
        outs = {f"out_{o}": torch.empty_like(m) for o, m in zip(OPERATIONS[name].outputs, made, strict=True)}
        torch.library.opcheck(operator(name, out=True), (*tensors, SMALL.text), outs)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_shapes_and_dtypes_are_those_of_the_fake_form(name: str, tokens: int) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for setup in (SMALL, BF16, V41):
        tensors = inputs(name, setup, tokens=tokens)
        with mhc.use_path("torch"):
            made = run(name, setup, tensors)
        with FakeTensorMode() as mode:
            faked = run(name, setup, [None if t is None else mode.from_tensor(t) for t in tensors])
        program = call(name, setup, tensors).program
        for result, fake, output in zip(made, faked, OPERATIONS[name].outputs, strict=True):
            assert result.shape == fake.shape == program.shape(output, tokens)
            assert result.dtype == fake.dtype and result.is_contiguous()


# ---- paths on the CPU -----------------------------------------------------------------------------------
@needs_executor
@pytest.mark.parametrize(("name", "gemm"), CASES, ids=IDS)
def test_the_executor_path_has_the_bits_of_the_host_module(name: str, gemm: bool) -> None:
    for setup in (SMALL, BF16):
        tensors = inputs(name, setup, gemm=gemm)
        with mhc.use_path("kernels"):
            made = run(name, setup, tensors)
        assert mhc.last_path() == (name, "host", "asked for")
        of = call(name, setup, tensors)
        given = {
            spec.name: as_numpy(t) for spec, t in zip(of.inputs, [t for t in tensors if t is not None], strict=True)
        }
        wanted = compile(of.program).load("host")(**given)  # unfused: another schedule, the same bits
        for result, output in zip(made, OPERATIONS[name].outputs, strict=True):
            assert as_numpy(result).tobytes() == wanted[output].tobytes(), (setup, output)


@needs_executor
@pytest.mark.parametrize(("name", "gemm"), CASES, ids=IDS)
def test_plain_torch_agrees_with_the_executor(name: str, gemm: bool) -> None:
    for setup, limit in ((SMALL, 2e-5), (BF16, 2e-2), (V41, 2e-5)):
        tensors = inputs(name, setup, gemm=gemm)
        made = []
        for path in ("kernels", "torch"):
            with mhc.use_path(path):
                made.append(run(name, setup, tensors))
        for kernel, plain, output in zip(*made, OPERATIONS[name].outputs, strict=True):
            if output == "q":  # a value on a tie may round either way
                assert (kernel.int() - plain.int()).abs().max() <= 1
                continue
            scale = max(1.0, float(kernel.double().abs().max()))
            assert float((kernel.double() - plain.double()).abs().max()) <= limit * scale, output


@needs_executor
@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_model_agrees_on_both_paths(model: str) -> None:
    setup = Setup(model, hidden=16)
    for name in ("gated_norm", "gated_boundary") if MODELS[model].rank else ("pre_norm", "boundary"):
        tensors = inputs(name, setup)
        made = []
        for path in ("kernels", "torch"):
            with mhc.use_path(path):
                made.append(run(name, setup, tensors))
        for kernel, plain in zip(*made, strict=True):
            torch.testing.assert_close(kernel, plain, rtol=1e-4, atol=1e-5)


@needs_executor
def test_the_first_site_with_delayed_pre_reads_stream_0() -> None:
    for path in ("kernels", "torch"):
        with mhc.use_path(path):
            tensors = inputs("pre", V41, first=True)
            made = mhc.Site(*run("pre", V41, tensors))
        assert torch.equal(made.y, tensors[0][:, 0])


@needs_executor
def test_auto_takes_the_executor_for_small_calls_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    from mhcgen.torch import calls

    calls._seen.clear()
    size = 16 * SMALL.config.streams * 3
    with caplog.at_level(logging.INFO, "mhcgen"):
        for limit, path in ((size, "host"), (size - 1, "torch")):
            with mhc.use_path("auto", host_limit=limit):
                run("mean", SMALL, inputs("mean"))
            assert mhc.last_path() == ("mean", path, f"T*n*H = {size} {'<=' if path == 'host' else '>'} {limit}")
            run("mean", SMALL, inputs("mean"))
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "mhcgen::mean runs on path" in line] == [
        f"mhcgen::mean runs on path host: T*n*H = {size} <= {size}",
        f"mhcgen::mean runs on path torch: T*n*H = {size} > {size - 1}",
    ]


def test_without_a_compiler_auto_is_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from mhcgen.torch import cpu

    monkeypatch.setattr(cpu, "_missing", ["the executor cannot be built here: no compiler"])
    run("mean", SMALL, inputs("mean"))
    assert mhc.last_path() == ("mean", "torch", "the executor cannot be built here: no compiler")


def test_float64_is_plain_torch() -> None:
    with mhc.use_path("kernels"):
        (y,) = run("mean", SMALL, inputs("mean", double=True))
    assert y.dtype == torch.float64 and mhc.last_path().path == "torch"


def test_a_path_that_does_not_exist() -> None:
    with pytest.raises(UsageError) as error:
        mhc.set_path("gpu")
    assert (error.value.code, error.value.where) == ("U-PATH", "path")


@pytest.mark.parametrize("limit", ["x", -1, None, True, float("nan")])
def test_a_limit_that_is_no_number(limit: Any) -> None:
    before = choice()
    with pytest.raises(UsageError) as error:
        mhc.set_path("auto", host_limit=limit)
    assert (error.value.code, error.value.where, choice()) == ("U-PATH", "host_limit", before)


# ---- out ------------------------------------------------------------------------------------------------
@needs_executor
@pytest.mark.parametrize("path", ["kernels", "torch"])
def test_out_is_written_and_returned(path: str) -> None:
    x, fn, _, scale, base, *_ = inputs("pre")
    with mhc.use_path(path):
        wanted = mhc.pre(x, fn, scale, base, setup=SMALL)
        out = mhc.Site(*(torch.full_like(t, torch.nan) for t in wanted))
        made = mhc.pre(x, fn, scale, base, setup=SMALL, out=out)
        assert made is out
        assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
        y = torch.full_like(wanted.y, torch.nan)
        assert mhc.mean(x, setup=SMALL, out=y) is y
        assert torch.equal(y, mhc.mean(x, setup=SMALL))


def test_out_that_overlaps_is_refused() -> None:
    buffer = torch.zeros(4 * 4 * 16)
    x = buffer[: 3 * 4 * 16].view(3, 4, 16)
    with pytest.raises(InputError) as error:
        mhc.mean(x, setup=SMALL, out=buffer[3 * 4 * 16 - 1 :][: 3 * 16].view(3, 16))
    assert error.value.code == "I-OVERLAP" and "overlaps x" in str(error.value)
    x, fn, _, scale, base, *_ = inputs("pre")
    gates = torch.empty(3, 4)
    with pytest.raises(InputError, match="out post overlaps out pre"):
        out = mhc.Site(torch.empty(3, 16), gates, gates, torch.empty(3, 4, 4))
        mhc.pre(x, fn, scale, base, setup=SMALL, out=out)


def test_out_records_no_gradient() -> None:
    x = inputs("mean", grad=True)[0]
    with pytest.raises(InputError) as error:
        mhc.mean(x, setup=SMALL, out=torch.empty(3, 16))
    assert error.value.code == "I-GRAD"
    with torch.no_grad():
        mhc.mean(x, setup=SMALL, out=torch.empty(3, 16))


def test_derivatives_that_torch_would_drop_are_refused() -> None:
    (x,) = inputs("mean")
    run = lambda t: mhc.mean(t, setup=SMALL)  # noqa: E731
    with pytest.raises(InputError, match="forward mode") as error:
        torch.func.jvp(run, (x,), (x,))
    assert error.value.code == "I-GRAD"
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(InputError, match="forward mode"):
            run(dual)
        assert torch.equal(run(x), run(torch.autograd.forward_ad.unpack_dual(dual).primal))  # no tangent, no refusal
    with pytest.raises(InputError, match="has no way through its gradient") as error:
        torch.func.grad(lambda t: run(t).sum())(x)
    assert error.value.code == "I-GRAD"


def test_the_one_float64_tensor_among_others_is_named() -> None:
    x, fn, _, scale, base, *_ = inputs("pre")
    for named, tensors in (("x", (x.double(), fn)), ("fn", (x, fn.double()))):
        with pytest.raises(InputTypeError, match=f"^error.I-DTYPE.: {named} has dtype float64"):
            mhc.pre(*tensors, scale, base, setup=SMALL)


@pytest.mark.parametrize("setup", [None, "deepseek-v4"])
def test_what_is_no_setup_is_said_so(setup: Any) -> None:
    with pytest.raises(InputTypeError, match="takes a Setup") as error:
        mhc.mean(inputs("mean")[0], setup=setup)
    assert error.value.code == "I-ARRAY"


def test_autograd_sees_that_out_changed_a_saved_tensor() -> None:
    y = torch.ones(3, 16)
    leaf = torch.ones(3, 16, requires_grad=True)
    product = (leaf * y).sum()
    mhc.mean(inputs("mean")[0], setup=SMALL, out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        mhc.mean(inputs("mean")[0], setup=SMALL, out=torch.empty(3, 16))


# ---- empty batches --------------------------------------------------------------------------------------
@needs_executor
@pytest.mark.parametrize("name", PLAIN)
def test_no_tokens(name: str) -> None:
    for path in ("kernels", "torch"):
        with mhc.use_path(path):
            for result in run(name, SMALL, inputs(name, tokens=0)):
                assert result.shape[0] == 0


# ---- refusals -------------------------------------------------------------------------------------------
def _pre(**changed: Any) -> Any:
    x, fn, _, scale, base, *_ = inputs("pre")
    given = {"x": x, "fn": fn, "scale": scale, "base": base, **changed}
    setup = given.pop("setup", SMALL)
    return mhc.pre(given.pop("x"), given.pop("fn"), given.pop("scale"), given.pop("base"), setup=setup, **given)


@pytest.mark.parametrize(
    ("changed", "code", "text"),
    [
        ({"x": torch.zeros(3, 4, 24)}, "I-SHAPE", "x has shape [3, 4, 24], and [T, 4, 16] is wanted"),
        ({"x": torch.zeros(4, 16)}, "I-SHAPE", "[T, 4, 16] is wanted"),
        ({"x": torch.tensor(1.0)}, "I-SHAPE", "[T, 4, 16] is wanted"),
        ({"fn": torch.zeros(24, 96)}, "I-SHAPE", "fn has shape [24, 96], and [24, 64] is wanted"),
        ({"x": torch.zeros(3, 4, 16, dtype=torch.bfloat16)}, "I-DTYPE", "x has dtype bfloat16, and float32 is"),
        ({"fn": torch.zeros(24, 64, dtype=torch.bfloat16)}, "I-DTYPE", "fn has dtype bfloat16"),
        ({"scale": torch.zeros(3, dtype=torch.float64)}, "I-DTYPE", "scale has dtype float64"),
        ({"base": torch.zeros(24, dtype=torch.int32)}, "I-DTYPE", "base has dtype int32"),
        ({"x": torch.zeros(3, 16, 4).transpose(1, 2)}, "I-LAYOUT", "x is not contiguous (shape [3, 4, 16]"),
        ({"x": torch.zeros(6, 4, 16)[::2]}, "I-LAYOUT", "strides [128, 16, 1]"),
        ({"x": torch.zeros(1, 4, 16).expand(3, 4, 16)}, "I-LAYOUT", "strides [0, 16, 1]"),
        ({"x": torch.zeros(3, 4, 32)[..., :16]}, "I-LAYOUT", "x is not contiguous"),
        ({"base": torch.zeros(24, device="meta")}, "I-DEVICE", "base is on meta, and x on cpu"),
        ({"x": np.zeros((3, 4, 16), np.float32)}, "I-ARRAY", "x is a numpy.ndarray"),
        ({"mixes": torch.zeros(3, 24)}, "I-UNKNOWN", "not both"),
        ({"fn": None}, "I-MISSING", "neither is given"),
        ({"fn": None, "mixes": torch.zeros(2, 24)}, "I-SHAPE", "mixes has shape [2, 24]"),
        ({"pre_prev": torch.zeros(3, 4)}, "I-UNKNOWN", "takes no pre_prev with model deepseek-v4"),
    ],
)  # fmt: skip
def test_bad_inputs(changed: dict[str, Any], code: str, text: str) -> None:
    with pytest.raises(MhcgenError) as error:
        _pre(**changed)
    assert error.value.code == code
    assert text in str(error.value)
    assert isinstance(error.value, InputTypeError if code in ("I-DTYPE", "I-ARRAY") else InputError)


def test_what_a_model_needs() -> None:
    x, fn, _, scale, base, *_ = inputs("pre_norm")
    with pytest.raises(InputError, match="needs norm_weight with model deepseek-v4"):
        mhc.pre_norm(x, fn, scale, base, None, setup=SMALL)
    *tensors, _, _ = inputs("boundary", V41)
    with pytest.raises(InputError, match=r"needs pre_prev with model deepseek-v4\.1"):
        mhc.boundary(*tensors, setup=V41)


def test_the_same_refusals_while_tracing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, fn, _, scale, base, *_ = inputs("pre")
    narrow = x[:, :, :8].contiguous()
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(t) for t in (narrow, fn, scale, base)]
        with pytest.raises(InputError) as error:
            mhc.pre(*given, setup=SMALL)
    assert error.value.code == "I-SHAPE"


def test_setups() -> None:
    setup = Setup("glm-5.3-flash", hidden=64, dtype="bf16", quant="fp8")
    assert mhc.setup.parse(setup.text) == setup and hash(setup) == hash(mhc.setup.parse(setup.text))
    assert setup.replace(iters=7).config.iters == 7 and setup.replace(iters=7) != setup
    assert setup.config.rms_eps == 1e-5 and setup.config.quant == "fp8"
    import pickle

    assert pickle.loads(pickle.dumps(setup)) == setup
    for code, bad in {
        "U-FUSE": {"fuse": "boundary"},
        "U-OPTION": {"scope": "site"},
        "U-DTYPE": {"dtype": "fp64"},
        "U-MODEL": {"model": "deepseek"},
    }.items():
        with pytest.raises(UsageError) as error:
            Setup(**bad)
        assert error.value.code == code
    with pytest.raises(UsageError, match="unknown schedule option"):
        Setup(schedule={"arch": "sm_90"})
    with pytest.raises(UsageError) as error:
        mhc.setup.parse("deepseek-v4")
    assert error.value.code == "U-SETUP"


@needs_executor
def test_schedules_never_change_a_bit() -> None:
    base = Setup("deepseek-v4", hidden=48)
    tensors = inputs("pre", base)
    with mhc.use_path("kernels"):
        wanted = run("pre", base, tensors)
        for setup in (
            base.replace(fuse="none"),
            base.replace(fuse="seed"),
            base.replace(schedule={"placement": "shared", "sync": "block", "threads": 128}),
        ):
            made = run("pre", setup, tensors)
            assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


# ---- warm-up --------------------------------------------------------------------------------------------
@needs_executor
def test_warm_up_says_what_it_built_and_nothing_is_built_after() -> None:
    setup = Setup("deepseek-v4.1", hidden=8, iters=2)
    report = mhc.warm_up(setup, ["pre", "post"], device="cpu")
    # pre with and without gates of the site before, each with its twin for misaligned tensors
    assert [(b.arm, b.twin) for b in report.built] == [("pre", "aligned"), ("pre", "misaligned")] * 2 + [
        ("post", "aligned"),
        ("post", "misaligned"),
    ]
    assert all(b.kernels for b in report.built) and "pre (misaligned)" in str(report)
    before = mhc.compile_count()
    with mhc.use_path("kernels"):
        for tokens in range(1, 6):
            run("pre", setup, inputs("pre", setup, tokens=tokens))
            run("pre", setup, inputs("pre", setup, tokens=tokens, first=True))
            run("post", setup, inputs("post", setup, tokens=tokens))
    assert mhc.compile_count() == before
    for operations in ([], ["branch"]):
        with pytest.raises(UsageError) as error:
            mhc.warm_up(setup, operations, device="cpu")
        assert error.value.code == "U-ARM"
