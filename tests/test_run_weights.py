"""`mhcgen run --weights`: a site's parameters from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trunks

from mhcgen import cli
from mhcgen.inputs import uniform
from mhcgen.module import HyperConnections

WHERE = trunks.topology(3, 12, "head")
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json, model.safetensors, and inputs of every scope."""
    folder = tmp_path_factory.mktemp("weights")
    trunks.checkpoint(folder / "model.safetensors", WHERE)
    config = {
        "model_type": "deepseek_v4",
        "hc_mult": WHERE.streams,
        "hc_sinkhorn_iters": WHERE.iters,
        "hc_eps": WHERE.hc_eps,
        "rms_norm_eps": WHERE.rms_eps,
        "hidden_size": WHERE.hidden,
        "num_hidden_layers": WHERE.layers,
    }
    (folder / "config.json").write_text(json.dumps(config))
    x = uniform("x", 0, (2, WHERE.streams, WHERE.hidden))
    np.savez(folder / "x.npz", x=x)
    np.savez(folder / "mixes.npz", x=x, mixes=uniform("mixes", 0, (2, WHERE.rows)))
    np.savez(folder / "twice.npz", x=x, scale=np.ones(3, np.float32))
    np.savez(folder / "norm.npz", x=x, norm_weight=np.ones(WHERE.hidden, np.float32))
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str, inputs: str = "x.npz", weights: bool = True) -> tuple[int, str]:
        given = ["--weights", str(folder / "model.safetensors")] if weights else []
        files = ["--inputs", str(folder / inputs), "--outputs", str(tmp_path / "out.npz"), "--force"]
        code = cli.run(["run", "--config", str(folder / "config.json"), "--backend", "host", *given, *files, *words])
        return code, capsys.readouterr().err

    return call


def results(tmp_path: Path) -> dict[str, Any]:
    return dict(np.load(tmp_path / "out.npz"))


@pytest.mark.parametrize(("layer", "site"), [("0", "attn"), ("2", "ffn")])
def test_a_sites_parameters_come_from_the_checkpoint(
    run: Run, folder: Path, tmp_path: Path, layer: str, site: str
) -> None:
    code, err = run("--layer", layer, "--site", site, "--fuse", "pre")
    assert (code, err) == (0, "")
    hyper = HyperConnections(WHERE, backend="host").load(folder / "model.safetensors", warm_up=False)
    wanted = hyper.pre(f"{layer}.{site}", np.load(folder / "x.npz")["x"])
    got = results(tmp_path)
    for name in ("pre", "post", "comb", "y"):
        assert got[name].tobytes() == getattr(wanted, name).tobytes()


def test_mixes_that_are_given_are_not_projected(run: Run, folder: Path, tmp_path: Path) -> None:
    assert run("--layer", "1", "--site", "attn", inputs="mixes.npz") == (0, "")
    hyper = HyperConnections(WHERE, backend="host").load(folder / "model.safetensors", warm_up=False)
    given = np.load(folder / "mixes.npz")
    assert results(tmp_path)["y"].tobytes() == hyper.finish("1.attn", given["x"], given["mixes"]).y.tobytes()


def test_the_gated_head(run: Run, folder: Path, tmp_path: Path) -> None:
    assert run("--scope", "head", "--site", "head") == (0, "")
    hyper = HyperConnections(WHERE, backend="host").load(folder / "model.safetensors", warm_up=False)
    assert results(tmp_path)["y"].tobytes() == hyper.exit(np.load(folder / "x.npz")["x"]).tobytes()


def test_norm_weights_are_the_checkpoints_unless_given(run: Run, tmp_path: Path) -> None:
    assert run("--layer", "0", "--site", "attn", "--norm") == (0, "")
    own = results(tmp_path)["z"]
    assert run("--layer", "0", "--site", "attn", "--norm", inputs="norm.npz") == (0, "")
    assert results(tmp_path)["z"].tobytes() != own.tobytes()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--site", "attn"], "which layer's attn site"),
        (["--layer", "0"], "attn or ffn, got nothing"),
        (["--layer", "0", "--site", "mlp"], "attn or ffn, got 'mlp'"),
        (["--layer", "-1", "--site", "attn"], "numbered from 0"),
        (["--layer", "x", "--site", "attn"], "--layer takes an integer"),
        (["--layer", "9", "--site", "attn"], "layers.9.hc_attn_fn is missing"),
        (["--layer", "0", "--scope", "head"], "belongs to no layer"),
        (["--layer", "0", "--site", "attn", "--scope", "mean"], "no parameters to read"),
        (["--layer", "0", "--site", "attn", "--hidden", "13"], "tensor layers.0.hc_attn_fn has shape"),
        (["--layer", "0", "--site", "attn", "--projection", "external"], "no tensor mixes"),
        (
            ["--layer", "0", "--site", "attn", "--model", "gated-residual", "--iters", "0", "--hc-eps", "0"],
            "read for fn, base and scale, and model gated-residual has",
        ),
    ],
)
def test_what_does_not_go_together(run: Run, words: list[str], what: str) -> None:
    code, err = run(*words)
    assert code == 2 and what in err and "hint:" in err


def test_a_parameter_that_is_given_twice(run: Run) -> None:
    code, err = run("--layer", "0", "--site", "attn", inputs="twice.npz")
    assert code == 2 and "error[I-TWICE]: scale is in the inputs and in the weights" in err


@pytest.mark.parametrize("words", [["--layer", "0"], ["--site", "attn"]])
def test_a_site_without_a_checkpoint(run: Run, words: list[str]) -> None:
    code, err = run(*words, weights=False)
    assert code == 2 and "--weights, which is missing" in err
