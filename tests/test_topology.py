"""Topologies read from configurations: what is found, what is refused, and which layer is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mhcgen.errors import InputError, UsageError
from mhcgen.topology import Topology, read_topology, topology_of
from mhcgen.weights import WeightFile

DEEPSEEK = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "vocab_size": 129280,
}
GLM = {
    "model_type": "glm5_next",
    "architectures": ["Glm5NextForConditionalGeneration"],
    "hidden_size": 9999,
    "text_config": {
        "model_type": "glm5_next_text",
        "hidden_size": 64,
        "num_hidden_layers": 45,
        "rms_norm_eps": 1e-5,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "mhc": True,
    },
}


def write(tmp_path: Path, table: dict[str, Any], name: str = "config.json") -> Path:
    path = tmp_path / name
    path.write_text(json.dumps(table))
    return path


def test_a_deepseek_configuration_exits_by_the_gated_head(tmp_path: Path) -> None:
    assert read_topology(write(tmp_path, DEEPSEEK)) == Topology(
        "deepseek-v4", 4, 64, 3, 20, rms_eps=1e-6, hc_eps=1e-6, norm_eps=1e-6, exit="head"
    )


def test_a_glm_configuration_is_nested_exits_by_mean_and_keeps_its_two_eps_apart(tmp_path: Path) -> None:
    found = read_topology(write(tmp_path, GLM))
    assert found is not None
    assert (found.model, found.exit, found.layers, found.hidden) == ("glm-5.3-flash", "mean", 45, 64)
    assert (found.rms_eps, found.norm_eps, found.hc_eps) == (1e-5, 1e-5, 1e-6)
    assert found.rows == 24


def test_the_exit_and_the_model_can_be_said(tmp_path: Path) -> None:
    found = read_topology(
        write(tmp_path, {**DEEPSEEK, "model_type": "mine", "architectures": None}), model="deepseek-v4"
    )
    assert found is not None and found.exit == "head"
    found = read_topology(write(tmp_path, DEEPSEEK), exit="mean")
    assert found is not None and found.exit == "mean"


@pytest.mark.parametrize("exit", [None, "tail", 1, []])
def test_an_exit_that_there_is_not_is_no_topology(exit: Any) -> None:
    with pytest.raises(UsageError, match="exit must be one of") as caught:
        Topology("deepseek-v4", 4, 64, 2, 20, 1e-6, 1e-6, 1e-6, exit)
    assert caught.value.code == "U-EXIT"


def test_a_config_of_a_topology_keeps_every_number(tmp_path: Path) -> None:
    found = read_topology(write(tmp_path, GLM))
    assert found is not None
    config = found.config(scope="trunk", norm=True)
    for name in ("model", "streams", "hidden", "layers", "iters", "rms_eps", "hc_eps", "norm_eps", "exit"):
        assert getattr(config, name) == getattr(found, name), name
    assert config.projection == "fma" and config.norm


@pytest.mark.parametrize("table", [{"model_type": "llama", "hidden_size": 64}, {**DEEPSEEK, "mhc": False}])
def test_a_serial_trunk_has_no_hyper_connections(tmp_path: Path, table: dict[str, Any]) -> None:
    assert read_topology(write(tmp_path, table)) is None


@pytest.mark.parametrize("key", ["hc_mult", "hc_eps", "hc_sinkhorn_iters", "rms_norm_eps", "hidden_size"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    table = {k: v for k, v in DEEPSEEK.items() if k != key}
    with pytest.raises(InputError, match=key) as caught:
        read_topology(write(tmp_path, table))
    assert caught.value.code == "I-CONFIG"


@pytest.mark.parametrize(
    "key", ["hc_mult", "hc_eps", "hc_sinkhorn_iters", "rms_norm_eps", "hidden_size", "num_hidden_layers"]
)
@pytest.mark.parametrize("value", [0, -1, "4", True, float("nan")])
def test_zero_negative_and_what_is_no_number_are_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(InputError, match=key) as caught:
        read_topology(write(tmp_path, {**DEEPSEEK, key: value}))
    assert caught.value.code == "I-CONFIG"


@pytest.mark.parametrize(("key", "value"), [("hc_mult", 4.0), ("hc_mult", 17), ("hc_sinkhorn_iters", 2.5)])
def test_counts_are_integers_in_range(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        read_topology(write(tmp_path, {**DEEPSEEK, key: value}))


@pytest.mark.parametrize("name", ["deepseek_v4_2", "deepseek_v42", "deepseek_v5", "llama", None])
def test_an_unknown_model_is_asked_for_and_never_guessed(tmp_path: Path, name: str | None) -> None:
    with pytest.raises(InputError, match="no model that is known"):
        read_topology(write(tmp_path, {**DEEPSEEK, "model_type": name, "architectures": []}))


@pytest.mark.parametrize("name", ["deepseek_v4_1", "deepseek_v41", "DeepseekV4p1ForCausalLM"])
def test_a_point_release_is_another_model(tmp_path: Path, name: str) -> None:
    found = read_topology(write(tmp_path, {**DEEPSEEK, "model_type": name, "architectures": []}))
    assert found is not None and (found.model, found.exit) == ("deepseek-v4.1", "pre")


def test_zero_is_for_models_that_have_no_such_number(tmp_path: Path) -> None:
    text = "model = 'mhc-lite'\nstreams = 3\nhidden = 8\nlayers = 1\n"
    found = read_topology(own(tmp_path, text))
    assert found is not None and (found.iters, found.hc_eps, found.rows) == (0, 0.0, 2 * 3 + 6)
    with pytest.raises(InputError, match="rms_eps"):
        read_topology(own(tmp_path, text + "rms_eps = 0\n"))


def test_a_trunk_with_engram_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="engram_layer_ids"):
        read_topology(write(tmp_path, {**DEEPSEEK, "engram_layer_ids": [2]}))


@pytest.mark.parametrize(
    ("counts", "layer", "what"),
    [
        ([4, None, 4], 1, "plain residual layer"),
        ([None, 4, 4], 1, "earlier layers are plain"),
        ([4, 4, 2], 2, "streams 2"),
    ],
)
def test_a_mixed_trunk_is_refused_in_either_order(tmp_path: Path, counts: list[Any], layer: int, what: str) -> None:
    with pytest.raises(InputError, match=what) as caught:
        read_topology(write(tmp_path, {**DEEPSEEK, "hc_mult": counts}))
    assert caught.value.code == "I-TRUNK"
    assert f"layer {layer}" in caught.value.message and f"layer {layer}" in caught.value.where


# ---- our own format -----------------------------------------------------------------------------------------
OWN = """
model = "glm-5.3-flash"
streams = 3
hidden = 16
"""


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trunk.toml"
    path.write_text(text)
    return path


def test_our_format_takes_what_is_left_out_from_the_model(tmp_path: Path) -> None:
    found = read_topology(own(tmp_path, OWN + "layers = 2\n"))
    assert found == Topology("glm-5.3-flash", 3, 16, 2, 20, rms_eps=1e-5, hc_eps=1e-6, norm_eps=1e-5, exit="mean")


def test_our_format_is_json_too(tmp_path: Path) -> None:
    table = {"streams": 2, "hidden": 8, "layers": 1, "iters": 5, "exit": "mean", "hc_eps": 0.5}
    found = read_topology(write(tmp_path, table))
    assert found == Topology("deepseek-v4", 2, 8, 1, 5, rms_eps=1e-6, hc_eps=0.5, norm_eps=1e-6, exit="mean")


def test_json_without_a_key_of_theirs_is_ours(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown key 'stream'"):
        read_topology(write(tmp_path, {"stream": 2, "hidden": 8, "layers": 1}))


def test_tables_of_layers_may_repeat_what_holds(tmp_path: Path) -> None:
    found = read_topology(own(tmp_path, OWN + "[[layers]]\nstreams = 3\n[[layers]]\niters = 20\n"))
    assert found is not None and found.layers == 2


@pytest.mark.parametrize(
    ("tables", "layer", "what"),
    [
        ("[[layers]]\n[[layers]]\nresidual = 'plain'\n", 1, "plain residual layer"),
        ("[[layers]]\nresidual = 'plain'\n[[layers]]\n", 1, "earlier layers are plain"),
        ("[[layers]]\n[[layers]]\nhc_eps = 1e-5\n", 1, "hc_eps 1e-05"),
        ("[[layers]]\n[[layers]]\n[[layers]]\nexit = 'head'\n", 2, "exit 'head'"),
    ],
)
def test_layers_of_our_format_that_disagree_are_refused(tmp_path: Path, tables: str, layer: int, what: str) -> None:
    with pytest.raises(InputError, match=what) as caught:
        read_topology(own(tmp_path, OWN + tables))
    assert caught.value.code == "I-TRUNK" and f"layer {layer}" in caught.value.where


def test_plain_layers_throughout_are_a_serial_trunk(tmp_path: Path) -> None:
    assert read_topology(own(tmp_path, OWN + "residual = 'plain'\nlayers = 4\n")) is None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (OWN + "layers = 2\nstream = 3\n", "unknown key 'stream'"),
        (OWN + "[[layers]]\nhidden = 3\n", "unknown key 'hidden'"),
        (OWN + "layers = 0\n", "layers"),
        (OWN + "layers = [3]\n", "not a table"),
        (OWN + "layers = []\n", "no layer"),
        (OWN, "layers .* is missing"),
        ("hidden = 3\nlayers = 1\n", "streams .* is missing"),
        ("streams = 3\nlayers = 1\n", "hidden .* is missing"),
        (OWN + "layers = 1\nexit = 'last'\n", "exit must be"),
        (OWN + "layers = 1\nresidual = 'both'\n", "residual must be"),
        (OWN + "layers = 1\nrms_eps = 0\n", "rms_eps"),
        ("model = 3\nstreams = 3\nhidden = 3\nlayers = 1\n", "model must be text"),
        ("streams = \n", "does not parse"),
    ],
)
def test_what_is_wrong_in_our_format_is_named(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(InputError, match=what) as caught:
        read_topology(own(tmp_path, text))
    assert caught.value.code == "I-CONFIG" and caught.value.where


def test_an_unknown_model_of_our_format_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown model"):
        read_topology(own(tmp_path, "model = 'glm'\nstreams = 3\nhidden = 3\nlayers = 1\n"))


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    for path, what in ((tmp_path / "absent.json", "cannot be read"), (write(tmp_path, [1]), "not a table")):  # type: ignore[arg-type]
        with pytest.raises(InputError, match=what):
            read_topology(path)


def test_tables_need_no_file() -> None:
    assert topology_of({"streams": 2, "hidden": 8, "layers": 1}, own=True) is not None
    assert topology_of({}, own=False) is None


# ---- gates of elements --------------------------------------------------------------------------------------
QWEN = {
    "model_type": "qwen4_exp",
    "text_config": {
        "hc_count": 4, "hc_lowrank": 320, "rms_norm_eps": 1e-6, "hidden_size": 2560, "num_hidden_layers": 48,
        "ple_layer_ids": [],
    },
}  # fmt: skip


def test_a_trunk_with_gates_of_elements_is_read(tmp_path: Path) -> None:
    found = read_topology(write(tmp_path, QWEN))
    assert found == Topology("gated-residual", 4, 2560, 48, 0, 1e-6, 0.0, 1e-6, "head", 320)
    assert found.rows == 324 and found.config(scope="head").rank == 320


def test_layers_that_add_to_the_streams_are_refused_by_their_key(tmp_path: Path) -> None:
    text = {**QWEN["text_config"], "ple_layer_ids": [2]}  # type: ignore[dict-item]
    with pytest.raises(InputError) as caught:
        read_topology(write(tmp_path, {**QWEN, "text_config": text}))
    assert caught.value.code == "I-CONFIG" and "ple_layer_ids" in caught.value.message
    assert "--model gated-residual" in caught.value.hints[0]


@pytest.mark.parametrize("key", ["hc_count", "hc_lowrank"])
def test_a_key_of_such_a_trunk_that_is_missing_is_named(tmp_path: Path, key: str) -> None:
    text = {name: value for name, value in QWEN["text_config"].items() if name != key}  # type: ignore[union-attr]
    with pytest.raises(InputError, match=key):
        read_topology(write(tmp_path, {**QWEN, "text_config": text}))


def test_the_rank_of_our_own_format(tmp_path: Path) -> None:
    table = {"model": "gated-residual", "streams": 3, "hidden": 16, "layers": 2}
    assert read_topology(write(tmp_path, table)).config().rank == 2  # type: ignore[union-attr]
    assert read_topology(write(tmp_path, {**table, "rank": 5})).rows == 5 + 3  # type: ignore[union-attr]
    with pytest.raises(InputError, match="must be an integer from 1 to 4096, got 0"):
        read_topology(write(tmp_path, {**table, "rank": 0}))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"layers":' * 100_000, "\ud800"])
def test_a_file_that_cannot_be_parsed_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InputError) as caught:
        read_topology(path)
    assert (caught.value.code, caught.value.where) == ("I-CONFIG", str(path))


def test_a_name_that_no_file_has_is_an_error_of_the_input() -> None:
    for read, code in ((read_topology, "I-CONFIG"), (WeightFile, "I-FILE")):
        for name in ("config\0.json", "n" * 300):
            with pytest.raises(InputError) as caught:
                read(name)
            assert caught.value.code == code
