"""mhcgen.torch's modules: trunks against the reference, training against plain torch, names and checkpoints."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'mhcgen[torch]'")

import torch
from torch import nn
from torch_cases import no_compiler

import mhcgen.torch as mhc
from mhcgen import reference
from mhcgen.errors import InputError, InputTypeError, UsageError
from mhcgen.models import MODELS
from mhcgen.models import model as find_model
from mhcgen.topology import Topology
from mhcgen.torch.modules import initial_values

ROOT = Path(__file__).parents[1]
HIDDEN = 16
needs_executor = pytest.mark.skipif(bool(no_compiler()), reason=f"no CPU executor: {no_compiler()}")


def topology(model: str = "deepseek-v4", exit: str = "", layers: int = 2, streams: int = 4) -> Topology:
    spec = find_model(model)
    eps = (spec.rms_eps, spec.hc_eps, spec.norm_eps)
    return Topology(model, streams, HIDDEN, layers, spec.iters, *eps, exit or spec.exit)


def stack(model: str = "deepseek-v4", exit: str = "", layers: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    branches = [(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)) for _ in range(layers)]
    made = mhc.HyperConnectionStack(branches, topology(model, exit, layers), **options)
    with torch.no_grad():  # away from where a trunk starts, so that gates and matrices differ between tokens
        for name, parameter in made.named_parameters():
            if name.endswith("_scale"):
                parameter.fill_(1.5)
            if "_norm" in name:
                parameter.uniform_(0.5, 1.5)
    return made


def by_reference(made: Any, e: np.ndarray[Any, Any], **config: Any) -> np.ndarray[Any, Any]:
    """y of the trunk's Program in float64, with the module's parameters and branches."""
    from mhcgen.build import build_config

    of = made.topology
    program = build_config(of.config(scope="trunk", norm=made.norm, **config))
    inputs: dict[str, Any] = {"e": e}
    branches = {}
    for number, layer in enumerate(made.layers):
        for site in ("attn", "ffn"):
            at = f"{number}.{site}"
            for part in ("fn", "base", "scale", "comb_logits"):
                if layer.part(site, part) is not None:
                    inputs[f"{at}.{part}"] = layer.part(site, part).detach().numpy()
            if made.norm:
                inputs[f"{at}.norm_weight"] = layer.norm_weight(site).detach().numpy()
            linear = getattr(layer, site)
            weight, bias = (p.detach().double().numpy() for p in (linear.weight, linear.bias))
            branches[f"{at}.branch"] = lambda z, w=weight, b=bias: z @ w.T + b
    if of.exit == "head":
        inputs.update({f"head.{part}": getattr(made, f"hc_head_{part}").detach().numpy() for part in
                       ("fn", "base", "scale")})  # fmt: skip
    return reference.run(program, inputs, branches)["y"]


TRUNKS = [("deepseek-v4", "head"), ("deepseek-v4", "mean"), ("glm-5.3-flash", "mean"), ("deepseek-v4.1", "pre"),
          ("deepseek-v4.1", "mean"), ("mhc-lite", "sum"), ("transformer-engine", "mean"), ("plain-hc", "sum"),
          ("static-mhc", "mean"), ("mhc.cu-static", "mean")]  # fmt: skip


@pytest.mark.parametrize(("model", "exit"), TRUNKS, ids=lambda value: str(value))
@pytest.mark.parametrize(
    "options", [{}, {"norm": True, "boundary": True}, {"norm": True, "gemm": True}], ids=["pre", "boundary", "gemm"]
)
def test_a_trunk_is_the_reference(model: str, exit: str, options: dict[str, Any]) -> None:
    made = stack(model, exit, **options)
    e = np.random.default_rng(0).standard_normal((6, HIDDEN)).astype(np.float32)
    path = "torch" if no_compiler() else "kernels"
    with mhc.use_path(path), torch.no_grad():
        y = made(torch.from_numpy(e).reshape(2, 3, HIDDEN))
    assert y.shape == (2, 3, HIDDEN)
    np.testing.assert_allclose(y.reshape(6, HIDDEN).numpy(), by_reference(made, e), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("model", "exit"), TRUNKS, ids=lambda value: str(value))
@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 5)], ids=str)
def test_a_trunk_takes_no_tokens(model: str, exit: str, lead: tuple[int, ...]) -> None:
    for options in ({}, {"norm": True, "boundary": True}):
        e = torch.zeros(*lead, HIDDEN, requires_grad=True)
        y = stack(model, exit, **options)(e)
        assert y.shape == e.shape
        y.sum().backward()
        assert e.grad is not None and e.grad.shape == e.shape


@needs_executor
def test_fusion_of_boundaries_changes_no_bit() -> None:
    e = torch.randn(3, HIDDEN)
    for model in ("deepseek-v4", "deepseek-v4.1"):
        made = []
        for boundary in (False, True):
            with mhc.use_path("kernels"), torch.no_grad():
                made.append(stack(model, norm=True, boundary=boundary)(e))
        assert torch.equal(*made)


@pytest.mark.parametrize("model", ["deepseek-v4", "deepseek-v4.1"])
def test_one_site_and_one_layer_are_parts_of_a_trunk(model: str) -> None:
    made = stack(model, "mean" if model == "deepseek-v4" else "pre", layers=1, norm=True)
    layer = made.layers[0]
    delayed = model == "deepseek-v4.1"
    sites = []
    for site in ("attn", "ffn"):
        one = mhc.HyperConnection(getattr(layer, site), made.setup, site=site, norm=True)
        one.load_state_dict({
            key.replace(f"{site}.", "branch.") if key.startswith(f"{site}.") else key: value
            for key, value in layer.state_dict().items()
            if site in key
        })  # fmt: skip
        sites.append(one)
    e = torch.randn(2, 3, HIDDEN)
    x = mhc.expand(e.reshape(6, HIDDEN), setup=made.setup).reshape(2, 3, 4, HIDDEN)
    if delayed:
        a, gates = sites[0](x)
        b, gates = sites[1](a, pre_prev=gates)
        c, last = layer(x)
        assert torch.equal(gates, last)
        y = mhc.collapse(b.reshape(6, 4, HIDDEN), gates, setup=made.setup)
    else:
        b, c = sites[1](sites[0](x)), layer(x)
        y = mhc.mean(b.reshape(6, 4, HIDDEN), setup=made.setup)
    assert torch.equal(b, c)
    assert torch.equal(made(e), y.reshape(2, 3, HIDDEN))


def test_a_site_starts_as_a_plain_residual() -> None:
    """pre gates read the mean of the streams, post gates are 1, and the matrix is near the identity."""
    for model in MODELS:
        if find_model(model).delayed_pre or find_model(model).rank:
            continue
        torch.manual_seed(0)
        setup = mhc.Setup(model, hidden=HIDDEN)
        site = mhc.HyperConnection(nn.Linear(HIDDEN, HIDDEN), setup)
        e = torch.randn(5, HIDDEN)
        x = mhc.expand(e, setup=setup)
        with torch.no_grad(), mhc.use_path("torch"):
            made = site(x)
            wanted = e + site.branch(e)
        last = find_model(model).stream_last
        streams = made.unbind(2 if last else 1)
        for stream in streams:
            # circulant: the diagonal of a softmax is 1 - 1e-3 here; tileops: sums reach 1 - eps, and eps is 0.02
            torch.testing.assert_close(stream, wanted, rtol=0.03, atol=0.03)


def test_bases_of_one_stream() -> None:
    from mhcgen.build import build

    base = initial_values(build("deepseek-v4", streams=1, hidden=8))["base"]
    assert float(torch.sigmoid(base[0])) > 0.999


# ---- training -------------------------------------------------------------------------------------------
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torch_block", ROOT / "examples" / "torch_block.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_follows_plain_torch(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    block = example()
    with mhc.use_path("torch"):
        assert block.main(["--device", "cpu", "--steps", "4", "--dtype", dtype]) == 0
    assert "the curves agree" in capsys.readouterr().out


@needs_executor
def test_training_through_the_executor(capsys: pytest.CaptureFixture[str]) -> None:
    assert example().main(["--device", "cpu", "--steps", "2"]) == 0
    assert "path='host'" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["transposed", "no columns", "not rescaled"])
def test_a_wrong_trunk_is_seen_by_the_example(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block = example()
    right = block.sinkhorn
    if fault == "transposed":
        monkeypatch.setattr(block, "sinkhorn", lambda logits: right(logits).transpose(1, 2))
    elif fault == "no columns":
        monkeypatch.setattr(block, "sinkhorn", lambda logits: logits.softmax(-1))
    else:
        monkeypatch.setattr(block, "gates", lambda x, fn, rows: x.float().flatten(1) @ fn[rows].T)
    with mhc.use_path("torch"):
        assert block.main(["--device", "cpu", "--steps", "3"]) == 1


# ---- dtypes and devices of parameters -------------------------------------------------------------------
def test_parameters_are_not_narrowed() -> None:
    made = stack(norm=True, dtype="bf16")
    with torch.no_grad():
        made.layers[0].hc_attn_base.fill_(1 + 2**-10)  # a number that bf16 does not have
    made.to(torch.bfloat16)
    assert made.layers[0].attn.weight.dtype == torch.bfloat16
    own = [p for name, p in made.named_parameters() if "hc_" in name or "_norm" in name]
    assert own and all(p.dtype == torch.float32 for p in own)
    assert bool((made.layers[0].hc_attn_base == 1 + 2**-10).all())
    made(torch.randn(3, HIDDEN, dtype=torch.bfloat16)).float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in own)
    made.half()
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in own)


@pytest.mark.parametrize("narrow", ["half", "bfloat16"])
def test_a_cast_after_float64_ends_at_fp32(narrow: str) -> None:
    made = stack(norm=True).double()
    own = [p for name, p in made.named_parameters() if "hc_" in name or "_norm" in name]
    assert own and all(p.dtype == torch.float64 for p in own)
    with torch.no_grad():
        made.hc_head_base.fill_(1 + 2**-20)  # a number that fp32 has, and nothing narrower
    made(torch.randn(2, HIDDEN)).sum().backward()
    getattr(made, narrow)()
    assert all(p.dtype == torch.float32 and p.grad is not None and p.grad.dtype == torch.float32 for p in own)
    assert bool((made.hc_head_base == 1 + 2**-20).all())
    assert made.layers[0].attn.weight.dtype != torch.float32


@pytest.mark.parametrize("pair", [(nn.Identity(),), (nn.Identity(),) * 3, nn.Identity(), (nn.Identity(), 3)])
def test_branches_that_are_no_pair(pair: Any) -> None:
    with pytest.raises(UsageError) as caught:
        mhc.HyperConnectionStack([(nn.Identity(), nn.Identity()), pair], topology())
    assert (caught.value.code, caught.value.where) == ("U-LAYERS", "branches[1]")


@pytest.mark.parametrize("branches", [[], None, [(nn.Identity(), nn.Identity())]])
def test_branches_for_other_layers(branches: Any) -> None:
    with pytest.raises(UsageError, match="2 layers") as caught:
        mhc.HyperConnectionStack(branches, topology())
    assert caught.value.code == "U-LAYERS"


def test_a_trunk_in_float64() -> None:
    made = stack(norm=True).double()
    assert made.hc_head_fn.dtype == torch.float64
    y = made(torch.randn(3, HIDDEN))
    assert y.dtype == torch.float64


def test_modules_copy_and_pickle(tmp_path: Path) -> None:
    made = stack(norm=True)
    e = torch.randn(3, HIDDEN)
    with mhc.use_path("torch"):
        wanted = made(e)
        assert torch.equal(copy.deepcopy(made)(e), wanted)
        torch.save(made, tmp_path / "model.pt")
        assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(e), wanted)


def test_autocast_reaches_the_branches_alone() -> None:
    made = stack(norm=True)
    seen = []
    made.layers[0].attn.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16), mhc.use_path("torch"):
        y = made(torch.randn(3, HIDDEN))
    assert seen == [torch.bfloat16] and y.dtype == torch.float32


# ---- names and checkpoints ------------------------------------------------------------------------------
def parts(made: Any) -> dict[str, torch.Tensor]:
    return {k: v for k, v in made.state_dict().items() if "hc_" in k or "_norm" in k}


def public(made: Any, spelling: str, dtype: Any = torch.float32) -> dict[str, torch.Tensor]:
    """A state dict in a public spelling, written out here rather than taken from the tables under test."""
    norms = {"attn": "input_layernorm", "ffn": "post_attention_layernorm"}
    found = {}
    for key, value in parts(made).items():
        words = key.split(".")
        if spelling == "deepseek":
            name = key
        elif words[0] != "layers":
            name = {"hf": "model.hc_head.hc_" + key.rpartition("_")[2], "glm": f"model.language_model.{key}"}[
                spelling
            ]
        elif words[2].endswith("_norm"):
            prefix = {"hf": "model.", "glm": "model.language_model."}[spelling]
            name = f"{prefix}layers.{words[1]}.{norms[words[2][:-5]]}.weight"
        else:
            _, site, part = words[2].split("_")
            name = {"hf": f"model.layers.{words[1]}.{site}_hc.{part}",
                    "glm": f"model.language_model.layers.{words[1]}.hc_{site}_{part}"}[spelling]  # fmt: skip
        found[name] = value.clone().to(dtype if name.endswith("fn") else torch.float32)
    found["model.embed_tokens.weight"] = torch.zeros(1, dtype=torch.int8)
    return found


@pytest.mark.parametrize("spelling", ["deepseek", "hf", "glm"])
def test_public_spellings(spelling: str) -> None:
    made, fresh = stack(norm=True), stack(norm=True)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    names = mhc.load_public_state_dict(fresh, public(made, spelling))
    assert set(names) == set(parts(made)) and set(names.values()) <= set(public(made, spelling))
    for key, value in parts(made).items():
        assert torch.equal(fresh.state_dict()[key], value), key
    assert not fresh.layers[0].attn.weight.any(), "branches are left alone"


def test_own_keys_are_those_of_deepseek() -> None:
    keys = set(parts(stack(norm=True)))
    assert keys == {
        *(f"layers.{i}.hc_{s}_{p}" for i in range(2) for s in ("attn", "ffn") for p in ("fn", "base", "scale")),
        *(f"layers.{i}.{s}_norm.weight" for i in range(2) for s in ("attn", "ffn")),
        *(f"hc_head_{p}" for p in ("fn", "base", "scale")),
    }
    assert {k for k in parts(stack("glm-5.3-flash")) if "head" in k} == set()


def test_bf16_is_widened_exactly_and_other_dtypes_are_refused() -> None:
    made, fresh = stack(), stack()
    mhc.load_public_state_dict(fresh, public(made, "glm", torch.bfloat16))
    assert torch.equal(fresh.layers[1].hc_ffn_fn, made.layers[1].hc_ffn_fn.to(torch.bfloat16).float())
    for dtype in (torch.float16, torch.float8_e4m3fn):
        with pytest.raises(InputTypeError) as error:
            mhc.load_public_state_dict(fresh, public(made, "deepseek", dtype))
        assert error.value.code == "I-DTYPE"


def test_bad_checkpoints() -> None:
    made = stack()
    found = public(made, "deepseek")
    for change, code in (
        ({"layers.1.hc_ffn_scale": None}, "I-TENSOR"),
        ({"layers.1.hc_ffn_scale": torch.zeros(4)}, "I-TENSOR"),
        ({"layers.0.hc_attn_fn": found["layers.0.hc_attn_fn"].T.contiguous()}, "I-TENSOR"),
        ({"model.layers.0.attn_hc.fn": torch.zeros(24, 64)}, "I-SPELLING"),
        ({key: None for key in found if "hc_" in key}, "I-SPELLING"),
    ):
        wrong = {k: v for k, v in {**found, **change}.items() if v is not None}
        with pytest.raises(InputError) as error:
            mhc.load_public_state_dict(made, wrong)
        assert error.value.code == code


@pytest.mark.parametrize(
    "norms",
    [
        {"attn": "{zzz}", "ffn": "a"}, {"attn": "{"}, {"attn": "{layer.x}"}, {"attn": "{layer[0]}"}, {"ffn": "a"},
        {"attn": 1}, "a", 3,
    ],
)
def test_names_of_norms_that_are_none(norms: Any) -> None:
    made = stack(norm=True)
    with pytest.raises(UsageError, match="for site attn") as caught:
        mhc.load_public_state_dict(made, public(made, "deepseek"), norms=norms)
    assert (caught.value.code, caught.value.where) == ("U-OPTION", "norms")
    own = {site: "layers.{layer}.{site}_norm.weight" for site in ("attn", "ffn")}
    assert mhc.load_public_state_dict(made, public(made, "deepseek"), norms=own)


@pytest.mark.parametrize("source", [None, 3, b"model.safetensors", ["a"]])
def test_what_is_no_source(source: Any) -> None:
    with pytest.raises(InputError) as caught:
        mhc.load_public_state_dict(stack(), source)
    assert caught.value.code == "I-FILE"


@pytest.mark.parametrize("value", [None, 1.0, [1.0], np.zeros(24, np.float32)])
def test_a_state_dict_holds_tensors(value: Any) -> None:
    made = stack()
    with pytest.raises(InputTypeError, match=r"layers\.0\.hc_attn_base is a") as caught:
        mhc.load_public_state_dict(made, {**public(made, "deepseek"), "layers.0.hc_attn_base": value, 3: 4})
    assert caught.value.code == "I-ARRAY"
    mhc.load_public_state_dict(made, {**public(made, "deepseek"), "step": value, 3: 4})  # nobody reads these


def test_one_layer_and_one_site_of_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    made = stack(norm=True)
    save_file(public(made, "hf", torch.bfloat16), tmp_path / "model.safetensors")
    layer = mhc.HyperLayer(nn.Identity(), nn.Identity(), made.setup, norm=True)
    names = mhc.load_public_state_dict(layer, tmp_path, layer=1)
    assert names["hc_ffn_base"] == "model.layers.1.ffn_hc.base"
    assert torch.equal(layer.hc_ffn_base, made.layers[1].hc_ffn_base)
    site = mhc.HyperConnection(nn.Identity(), made.setup, site="ffn")
    assert set(mhc.load_public_state_dict(site, tmp_path, layer=1)) == {
        f"hc_ffn_{p}" for p in ("fn", "base", "scale")
    }
    assert torch.equal(site.hc_ffn_fn, made.layers[1].hc_ffn_fn.to(torch.bfloat16).float())


def test_a_trunk_from_a_model_configuration(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v4", "hidden_size": HIDDEN, "num_hidden_layers": 2, "hc_mult": 4,
              "hc_sinkhorn_iters": 7, "hc_eps": 1e-5, "rms_norm_eps": 1e-4}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    branches = [(nn.Identity(), nn.Identity()) for _ in range(2)]
    made = mhc.HyperConnectionStack.from_config(path, branches, norm=True, dtype="bf16")
    of = made.layers[1].setup.config
    assert (of.iters, of.hc_eps, of.rms_eps, of.dtype, made.topology.exit) == (7, 1e-5, 1e-4, "bf16", "head")
    path.write_text(json.dumps({key: value for key, value in config.items() if not key.startswith("hc_")}))
    with pytest.raises(InputError) as error:
        mhc.HyperConnectionStack.from_config(path, branches)
    assert error.value.code == "I-SERIAL"


# ---- refusals -------------------------------------------------------------------------------------------
def test_bad_modules() -> None:
    setup = mhc.Setup(hidden=HIDDEN)
    with pytest.raises(UsageError, match="site must be"):
        mhc.HyperConnection(nn.Identity(), setup, site="mlp")
    with pytest.raises(UsageError, match="2 layers"):
        mhc.HyperConnectionStack([(nn.Identity(), nn.Identity())], topology())
    with pytest.raises(UsageError, match="cannot be torch's"):
        stack(boundary=True, gemm=True)
    site = mhc.HyperConnection(nn.Linear(HIDDEN, 8), setup)
    with pytest.raises(InputError, match=r"the branch returned \[3, 8\], and \[3, 16\]"):
        site(torch.randn(3, 4, HIDDEN))


# ---- without torch --------------------------------------------------------------------------------------
def test_importing_mhcgen_imports_no_torch() -> None:
    code = """
import sys
import mhcgen, mhcgen.cli, mhcgen.runtime, mhcgen.module
mhcgen.compile(mhcgen.build("deepseek-v4", hidden=64), fuse="pre").source
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_importing_mhcgen_torch_needs_no_cupy_no_compiler_and_no_driver() -> None:
    code = """
import sys
for name in ("cupy", "safetensors", "triton"):
    sys.modules[name] = None
import mhcgen.torch
assert "mhcgen.backends.host" not in sys.modules
from mhcgen.backends import driver
assert driver._loaded is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""})
