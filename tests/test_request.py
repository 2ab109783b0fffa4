"""Options to Config and Options: what fusions imply, what wins, and that a header's command makes the same again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from mhcgen.build import Config, build_config, configure, origin
from mhcgen.commands.options import SHARED, Asked, takes_request, token_counts
from mhcgen.errors import InputError, MhcgenError, UsageError
from mhcgen.passes import run_pipeline
from mhcgen.plan import Options
from mhcgen.request import NAMES, read_config, request


def asked(words: Sequence[str]) -> Asked:
    """What a verb gets for these words of a command line."""
    found: list[Asked] = []
    app = typer.Typer()

    @app.command()
    @takes_request
    def verb(asked: Asked) -> None:
        found.append(asked)

    command = typer.main.get_command(app)
    with command.make_context("verb", list(words)) as context:
        command.invoke(context)
    return found[0]


def test_defaults_are_those_of_the_design() -> None:
    config, options = request(streams=4, fuse="pre")
    assert config == Config(
        model="deepseek-v4", streams=4, hidden=4096, iters=20, rms_eps=1e-6, hc_eps=1e-6, dtype="fp32",
        functions="ieee", projection="external", scope="pre",
    )
    assert options == Options(fuse="pre", arch="sm_90")
    assert request() == (configure(), Options())


@pytest.mark.parametrize(
    ("fuse", "implied"),
    [
        ("none", {}),
        ("seed", {}),
        ("pre", {}),
        ("pre-norm", {"norm": True}),
        ("pre-norm-quant", {"norm": True, "quant": "q8"}),
        ("site", {"scope": "site"}),
        ("boundary", {"scope": "boundary", "projection": "fma"}),
        ("delayed", {"scope": "boundary", "projection": "fma"}),
        ("rowsq+gates,collapse", {}),
        ("collapse+norm", {"norm": True}),
        ("norm+quant", {"norm": True, "quant": "q8"}),
        ("project+rowsq", {"projection": "fma"}),
        ("post+project", {"scope": "boundary", "projection": "fma"}),
        ("collapse+branch", {"scope": "site"}),
        ("post+tap", {"scope": "boundary", "projection": "fma", "extra": ("tap",)}),
        ("engram,post+tap", {"scope": "boundary", "projection": "fma", "extra": ("engram", "tap")}),
        ("1.attn.post+1.ffn.rowsq", {"scope": "trunk", "projection": "fma", "layers": 2}),
    ],
)
def test_a_fusion_implies_the_program_that_has_its_stages(fuse: str, implied: dict[str, Any]) -> None:
    config, options = request(fuse=fuse)
    assert config == configure(**implied)
    assert options.fuse == fuse


@pytest.mark.parametrize(
    ("given_", "field", "value"),
    [
        ({"fuse": "pre-norm", "norm": False}, "norm", False),
        ({"fuse": "pre-norm-quant", "quant": "fp8"}, "quant", "fp8"),
        ({"fuse": "boundary", "projection": "external"}, "projection", "external"),
        ({"fuse": "site", "scope": "boundary"}, "scope", "boundary"),
        ({"fuse": "0.attn.post", "layers": 3}, "layers", 3),
        ({"quant": "q8"}, "norm", True),
        ({"extra": "tap"}, "scope", "boundary"),
        ({"extra": ["tap,engram"]}, "extra", ("engram", "tap")),
        ({"extra": "tap", "scope": "trunk"}, "scope", "trunk"),
        ({"scope": "boundary"}, "projection", "fma"),
        ({"rms_eps": 1e-5}, "hc_eps", 1e-6),
        ({"hc_eps": 1e-2}, "rms_eps", 1e-6),
    ],
)
def test_what_is_explicit_wins(given_: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(request(**given_)[0], field) == value


def test_the_fusion_is_kept_without_white_space_and_the_arch_in_its_canonical_spelling() -> None:
    _, options = request(fuse=" rowsq +\ngates, collapse", arch="9.0")
    assert (options.fuse, options.arch) == ("rowsq+gates,collapse", "sm_90")


@pytest.mark.parametrize(
    ("given_", "code", "where"),
    [
        ({"model": "deepseek-v5"}, "U-MODEL", "--model"),
        ({"streams": 17}, "U-STREAMS", "--streams"),
        ({"rms_eps": float("nan")}, "U-EPS", "--rms-eps"),
        ({"functions": "exact"}, "U-CLASS", "--class"),
        ({"sumsq": "fp16"}, "U-CLASS", "--sumsq"),
        ({"projection": "tf64"}, "U-CLASS", "--projection"),
        ({"arch": "sm_61"}, "U-ARCH", "--arch"),
        ({"extra": "lora"}, "U-WITH", "--with"),
        ({"extra": "tap", "scope": "pre"}, "U-WITH", "--with"),
        ({"extra": "tap", "fuse": "site"}, "U-WITH", "--with"),
        ({"quant": "q8", "norm": False}, "U-QUANT", "--quant"),
        ({"streamz": 4}, "U-OPTION", "streamz"),
        ({"streams": "4"}, "U-OPTION", "streams"),
        ({"norm": "yes"}, "U-OPTION", "norm"),
        ({"norm": 1}, "U-OPTION", "norm"),
        ({"fuse": ["pre"]}, "U-OPTION", "fuse"),
        ({"extra": [1]}, "U-OPTION", "extra"),
        ({"streams": True}, "U-OPTION", "streams"),
    ],
)
def test_what_means_nothing_names_the_option(given_: dict[str, Any], code: str, where: str) -> None:
    with pytest.raises(UsageError) as caught:
        request(**given_)
    assert (caught.value.code, caught.value.where) == (code, where)
    assert caught.value.hints


def test_none_means_not_given() -> None:
    assert request(**dict.fromkeys(NAMES)) == request()


def test_every_field_has_an_option_and_every_option_a_field() -> None:
    """A field that no option sets could not be named by the command in a header."""
    have = {parameter.name for parameter in SHARED} - {"config", "tuned"}  # these name where options come from
    assert have == set(NAMES)
    assert have == {*Config.__dataclass_fields__, *Options.__dataclass_fields__}


configs = st.builds(
    dict,
    model=st.sampled_from(["deepseek-v4", "glm-5.3-flash"]),
    streams=st.integers(1, 16),
    hidden=st.integers(1, 8192),
    iters=st.integers(1, 40),
    rms_eps=st.floats(1e-8, 1.0),
    hc_eps=st.sampled_from([1e-6, 1e-2, 3e-5]),
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    functions=st.sampled_from(["ieee", "fast"]),
    sumsq=st.sampled_from(["fp64", "fp32"]),
    projection=st.sampled_from([None, "external", "fma"]),
    scope=st.sampled_from(["pre", "site", "boundary", "trunk"]),
    norm=st.sampled_from([None, True]),
    quant=st.sampled_from([None, "q8", "fp8"]),
    quant_pow2=st.sampled_from([None, True]),
    early_stop=st.sampled_from([None, True]),
    iterations_out=st.sampled_from([None, True]),
    layers=st.sampled_from([None, 2]),
    exit=st.sampled_from([None, "mean", "head"]),
    extra=st.sampled_from([(), ("engram",), ("engram", "tap")]),
    fuse=st.sampled_from(["none", "pre", "pre-norm", "pre-norm-quant", "boundary", "gates+sinkhorn"]),
)


@given(configs)
def test_the_command_of_a_header_names_the_same_program(chosen: dict[str, Any]) -> None:
    try:
        config, options = request(**chosen)
        run_pipeline(build_config(config), options, stop_after="fuse")
    except MhcgenError:
        return  # nothing is emitted, so there is no header
    again = asked([*shlex.split(origin(config)), "--fuse", options.fuse])
    assert again.config == config
    assert again.options == options


def test_numbers_are_read_here_and_not_by_typer() -> None:
    got = asked(["--streams", "+3", "--rms-eps", "1e-5", "--threads", "128"])
    assert (got.config.streams, got.config.rms_eps, got.options.threads) == (3, 1e-5, 128)
    assert got.given == ("streams", "rms_eps", "threads")


@pytest.mark.parametrize("suffix", [".json", ".toml"])
def test_a_file_gives_what_options_do_not(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    if suffix == ".json":
        path.write_text(json.dumps({"streams": 8, "rms-eps": 1e-5, "class": "fast", "fuse": "pre", "with": []}))
    else:
        path.write_text('streams = 8\nrms-eps = 1e-5\nclass = "fast"\nfuse = "pre"\nwith = []\n')
    assert read_config(path)["functions"] == "fast"
    got = asked(["--config", str(path), "--streams", "2"])
    assert (got.config.streams, got.config.rms_eps, got.config.functions) == (2, 1e-5, "fast")
    assert got.options.fuse == "pre"


def test_a_model_s_own_configuration_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "deepseek_v4", "hc_mult": 4, "hc_sinkhorn_iters": 7, "hc_eps": 1e-6,
                "rms_norm_eps": 1e-5, "hidden_size": 512, "num_hidden_layers": 2,
            }
        )
    )
    config = asked(["--config", str(path), "--fuse", "pre"]).config
    assert (config.hidden, config.iters, config.rms_eps, config.layers) == (512, 7, 1e-5, 2)
    with pytest.raises(UsageError) as caught:
        asked(["--config", str(path), "--model", "plain-hc"])
    assert caught.value.code == "U-ITERS"
    assert caught.value.notes[-1] == f"iters = 7 is from {path}", "nobody gave --iters"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "{"),
        ("a.json", "[1]"),
        ("a.json", "\x00"),
        ("a.json", "[" * 100_000),
        ("a.toml", "streams = "),
        ("a.json", '{"model_type": "llama", "hidden_size": 64}'),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError) as caught:
        read_config(tmp_path / name)
    assert caught.value.code == "I-CONFIG"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path / "no.json")
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path)


def test_token_counts() -> None:
    assert token_counts("1, 4,4,0") == (1, 4, 0)
    for bad in ("", "1,", "-1", "1.0", "x", "²", str(2**31)):
        with pytest.raises(UsageError) as caught:
            token_counts(bad)
        assert caught.value.code == "U-TOKENS"
