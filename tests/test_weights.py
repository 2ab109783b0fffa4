"""Site and head parameters from checkpoints: every spelling, exact widening, refusals by tensor name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mhcgen.errors import EnvironmentFault, InputError, InputTypeError, UsageError
from mhcgen.inputs import uniform
from mhcgen.weights import (
    INDEX,
    SPELLINGS,
    Spelling,
    WeightFile,
    find_spelling,
    head_parameters,
    layers_of,
    site_parameters,
    trunk_parameters,
)

N, H, LAYERS = 3, 8, 2
ROWS = (2 + N) * N
SITE_SHAPES = {"fn": (ROWS, N * H), "base": (ROWS,), "scale": (3,)}
HEAD_SHAPES = {"fn": (N, N * H), "base": (N,), "scale": (1,)}


def checkpoint(spelling: Spelling, layers: int = LAYERS) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of a trunk by the names of a spelling, and tensors that are none of ours."""
    found: dict[str, np.ndarray[Any, Any]] = {}

    def add(name: str, shape: tuple[int, ...]) -> None:
        found[name] = uniform(name, 0, shape)

    for layer in range(layers):
        for site in ("attn", "ffn"):
            for part, shape in SITE_SHAPES.items():
                add(spelling.site.format(layer=layer, site=site, part=part), shape)
            add(spelling.norms[site].format(layer=layer), (H,))
    for part, shape in HEAD_SHAPES.items():
        add(spelling.head.format(part=part), shape)
    add("embed.weight", (5, H))
    add("mtp.0.hc_attn_fn", (ROWS, N * H))
    return found


def spelled(name: str) -> Spelling:
    return next(spelling for spelling in SPELLINGS if spelling.name == name)


DEEPSEEK = spelled("deepseek-v4")


def save(tmp_path: Path, tensors: dict[str, Any], name: str = "model.safetensors") -> Path:
    path = tmp_path / name
    if name.endswith(".npz"):
        np.savez(path, **tensors)
    else:
        save_file(tensors, path)
    return path


@pytest.mark.parametrize("kind", ["model.safetensors", "model.npz"])
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.name)
def test_every_spelling_is_found_and_read(tmp_path: Path, spelling: Spelling, kind: str) -> None:
    tensors = checkpoint(spelling)
    weights = WeightFile(save(tmp_path, tensors, kind))
    assert find_spelling(weights) is spelling
    assert layers_of(weights) == (0, 1)
    for layer in range(LAYERS):
        for site in ("attn", "ffn"):
            found = site_parameters(weights, layer, site, N, H, norm=True)
            for part in SITE_SHAPES:
                np.testing.assert_array_equal(
                    found[part], tensors[spelling.site.format(layer=layer, site=site, part=part)]
                )
            np.testing.assert_array_equal(found["norm_weight"], tensors[spelling.norms[site].format(layer=layer)])
    head = head_parameters(weights, N, H)
    for part in HEAD_SHAPES:
        np.testing.assert_array_equal(head[part], tensors[spelling.head.format(part=part)])


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("deepseek-v4", "layers.1.hc_ffn_scale"),
        ("glm-5.3-flash", "model.language_model.layers.1.hc_ffn_scale"),
        ("model modules", "model.layers.1.ffn_hc.scale"),
        ("gguf", "blk.1.hc_ffn_scale"),
    ],
)
def test_public_names_are_spelled_out(spelling: str, name: str) -> None:
    assert spelled(spelling).site.format(layer=1, site="ffn", part="scale") == name


@pytest.mark.parametrize("name", ["MODEL.SAFETENSORS", "Model.NPZ"])
def test_kinds_of_files_are_known_in_capitals(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, checkpoint(DEEPSEEK), name.lower()).rename(tmp_path / name)
    assert find_spelling(WeightFile(path)) is DEEPSEEK


def test_the_heads_public_names() -> None:
    assert DEEPSEEK.head.format(part="fn") == "hc_head_fn"
    assert spelled("modules").head.format(part="fn") == "hc_head.hc_fn"


def test_a_trunk_is_named_as_its_program_is(tmp_path: Path) -> None:
    from mhcgen import build

    found = trunk_parameters(save(tmp_path, checkpoint(DEEPSEEK)), LAYERS, N, H, exit="head", norm=True)
    program = build("deepseek-v4", streams=N, hidden=H, scope="trunk", layers=LAYERS, exit="head", norm=True)
    assert {t.name: program.shape(t.name, 1) for t in program.of_role("parameter")} == {
        name: array.shape for name, array in found.items()
    }
    assert not any(name.startswith("head") for name in trunk_parameters(tmp_path, LAYERS, N, H, exit="mean"))


def test_norm_weights_may_have_names_of_their_own(tmp_path: Path) -> None:
    tensors = {**checkpoint(DEEPSEEK), "a.0": np.ones(H, np.float32), "f.0": np.zeros(H, np.float32)}
    path = save(tmp_path, tensors)
    assert site_parameters(path, 0, "ffn", N, H, norm="f.{layer}")["norm_weight"].sum() == 0
    found = trunk_parameters(path, 1, N, H, exit="mean", norm={"attn": "a.{layer}", "ffn": "f.{layer}"})
    assert found["0.attn.norm_weight"].sum() == H
    with pytest.raises(InputError, match=r"tensor other\.ffn\.0 is missing"):
        site_parameters(path, 0, "ffn", N, H, norm="other.{site}.{layer}")


def test_bf16_is_widened_exactly_and_fp32_keeps_its_low_bits(tmp_path: Path) -> None:
    tensors = checkpoint(DEEPSEEK)
    # Every finite bf16 number is an fp32 number; infinities and subnormals stay what they are.
    bits = np.arange(ROWS * N * H, dtype=np.uint16) * np.uint16(181)
    bits[(bits & 0x7F80) == 0x7F80] = 0x7F80
    narrow = bits.view(ml_dtypes.bfloat16).reshape(ROWS, N * H)
    fine = np.full(ROWS, 1.0 + 2.0**-10, np.float32)
    tensors |= {"layers.0.hc_attn_fn": narrow, "layers.0.hc_attn_base": fine}
    found = site_parameters(save(tmp_path, tensors), 0, "attn", N, H)
    assert found["fn"].dtype == np.float32
    np.testing.assert_array_equal(found["fn"].view(np.uint32).ravel(), bits.astype(np.uint32) << 16)
    np.testing.assert_array_equal(found["base"], fine)


@pytest.mark.parametrize("dtype", ["float16", "float64", "int32", "uint16", "uint8"])
@pytest.mark.parametrize("part", ["fn", "base", "scale"])
def test_other_dtypes_are_refused_by_name(tmp_path: Path, dtype: str, part: str) -> None:
    name = f"layers.1.hc_ffn_{part}"
    tensors = checkpoint(DEEPSEEK)
    tensors[name] = tensors[name].astype(dtype)
    with pytest.raises(InputTypeError, match=f"tensor {name} has dtype {dtype}") as caught:
        site_parameters(save(tmp_path, tensors), 1, "ffn", N, H)
    assert caught.value.code == "I-DTYPE"


def test_fp8_is_refused_by_name(tmp_path: Path) -> None:
    tensors = checkpoint(DEEPSEEK)
    tensors["layers.0.hc_attn_fn"] = tensors["layers.0.hc_attn_fn"].astype(ml_dtypes.float8_e4m3fn)
    with pytest.raises(InputTypeError, match=r"layers\.0\.hc_attn_fn has dtype"):
        site_parameters(save(tmp_path, tensors), 0, "attn", N, H)


def test_npz_does_not_carry_bf16_and_says_so(tmp_path: Path) -> None:
    tensors = checkpoint(DEEPSEEK)
    tensors["layers.0.hc_attn_fn"] = tensors["layers.0.hc_attn_fn"].astype(ml_dtypes.bfloat16)
    with pytest.raises(InputTypeError, match=r"layers\.0\.hc_attn_fn") as caught:
        site_parameters(save(tmp_path, tensors, "m.npz"), 0, "attn", N, H)
    assert "raw bytes" in caught.value.hints[0]


@pytest.mark.parametrize("part", ["fn", "base", "scale"])
def test_a_missing_tensor_is_refused_by_name(tmp_path: Path, part: str) -> None:
    name = f"layers.1.hc_ffn_{part}"
    tensors = {k: v for k, v in checkpoint(DEEPSEEK).items() if k != name}
    with pytest.raises(InputError, match=f"tensor {name} is missing") as caught:
        trunk_parameters(save(tmp_path, tensors), LAYERS, N, H, exit="mean")
    assert caught.value.code == "I-TENSOR"
    assert str(list(SITE_SHAPES[part])) in caught.value.message


@pytest.mark.parametrize("part", ["fn", "base", "scale"])
def test_a_missing_head_is_refused_by_name(tmp_path: Path, part: str) -> None:
    tensors = {k: v for k, v in checkpoint(DEEPSEEK).items() if k != f"hc_head_{part}"}
    with pytest.raises(InputError, match=f"tensor hc_head_{part} is missing"):
        head_parameters(save(tmp_path, tensors), N, H)


def test_a_file_without_any_head_names_the_one_of_its_spelling(tmp_path: Path) -> None:
    glm = spelled("glm-5.3-flash")
    tensors = {k: v for k, v in checkpoint(glm).items() if "head" not in k}
    with pytest.raises(InputError, match=r"tensor model\.language_model\.hc_head_fn is missing"):
        head_parameters(save(tmp_path, tensors), N, H)


def test_a_layer_beyond_the_checkpoint_names_the_layers_there_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"layers\.7\.hc_attn_fn is missing") as caught:
        site_parameters(save(tmp_path, checkpoint(DEEPSEEK)), 7, "attn", N, H)
    assert caught.value.notes == ("layers with hyper-connections: 0-1",)


@pytest.mark.parametrize("part", ["fn", "base", "scale"])
def test_a_wrong_size_says_what_was_found_and_what_is_wanted(tmp_path: Path, part: str) -> None:
    name = f"layers.0.hc_attn_{part}"
    tensors = checkpoint(DEEPSEEK)
    tensors[name] = np.concatenate([tensors[name], tensors[name][:1]])
    found, wanted = list(tensors[name].shape), list(SITE_SHAPES[part])
    with pytest.raises(InputError) as caught:
        site_parameters(save(tmp_path, tensors), 0, "attn", N, H)
    assert caught.value.code == "I-TENSOR"
    assert caught.value.message == (
        f"tensor {name} has shape {found} ({tensors[name].size} elements), "
        f"and {wanted} ({int(np.prod(wanted))} elements) is wanted"
    )


@pytest.mark.parametrize(("streams", "hidden"), [(N + 1, H), (N, H + 1)])
def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path, streams: int, hidden: int) -> None:
    with pytest.raises(InputError, match=r"layers\.0\.hc_attn_fn has shape"):
        site_parameters(save(tmp_path, checkpoint(DEEPSEEK)), 0, "attn", streams, hidden)


def test_a_transposed_matrix_is_refused_though_its_count_fits(tmp_path: Path) -> None:
    tensors = checkpoint(DEEPSEEK)
    tensors["layers.0.hc_attn_fn"] = np.ascontiguousarray(tensors["layers.0.hc_attn_fn"].T)
    with pytest.raises(InputError, match=r"layers\.0\.hc_attn_fn") as caught:
        site_parameters(save(tmp_path, tensors), 0, "attn", N, H)
    assert "transposed" in caught.value.hints[0]


def test_dimensions_of_size_one_and_split_columns_are_no_matter(tmp_path: Path) -> None:
    tensors = checkpoint(DEEPSEEK)
    plain = site_parameters(save(tmp_path, tensors), 0, "attn", N, H)
    tensors["layers.0.hc_attn_base"] = tensors["layers.0.hc_attn_base"].reshape(1, ROWS)
    tensors["layers.0.hc_attn_fn"] = tensors["layers.0.hc_attn_fn"].reshape(ROWS, N, H)
    tensors["hc_head_scale"] = tensors["hc_head_scale"].reshape(())
    path = save(tmp_path, tensors, "other.safetensors")
    shaped = site_parameters(path, 0, "attn", N, H)
    for part, shape in SITE_SHAPES.items():
        assert shaped[part].shape == shape
        np.testing.assert_array_equal(shaped[part], plain[part])
    assert head_parameters(path, N, H)["scale"].shape == (1,)


def test_two_spellings_in_one_file_are_refused(tmp_path: Path) -> None:
    tensors = {**checkpoint(DEEPSEEK), **checkpoint(spelled("gguf"))}
    with pytest.raises(InputError, match="fits 2 spellings") as caught:
        site_parameters(save(tmp_path, tensors), 0, "attn", N, H)
    assert caught.value.code == "I-SPELLING"
    assert any("blk." in note for note in caught.value.notes)


def test_two_heads_in_one_file_are_refused(tmp_path: Path) -> None:
    tensors = {**checkpoint(DEEPSEEK), "model.hc_head.hc_fn": np.zeros((N, N * H), np.float32)}
    with pytest.raises(InputError, match="more than one gated head"):
        head_parameters(save(tmp_path, tensors), N, H)


def test_a_file_without_hyper_connections_lists_the_spellings(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none of the file's 1 tensors") as caught:
        site_parameters(save(tmp_path, {"w": np.ones(3, np.float32)}), 0, "attn", N, H)
    assert len(caught.value.notes) == len(SPELLINGS)


def test_a_site_is_attn_or_ffn(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mlp"):
        site_parameters(save(tmp_path, checkpoint(DEEPSEEK)), 0, "mlp", N, H)


# ---- shards -------------------------------------------------------------------------------------------------
def shard(tmp_path: Path, tensors: dict[str, Any]) -> dict[str, str]:
    """Two files and their index; returns the weight map."""
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("name", ["", INDEX])
def test_shards_are_read_through_their_index(tmp_path: Path, name: str) -> None:
    tensors = checkpoint(DEEPSEEK)
    tensors["layers.0.hc_attn_fn"] = tensors["layers.0.hc_attn_fn"].astype(ml_dtypes.bfloat16)
    shard(tmp_path, tensors)
    found = trunk_parameters(tmp_path / name, LAYERS, N, H, exit="head")
    np.testing.assert_array_equal(found["0.attn.fn"], tensors["layers.0.hc_attn_fn"].astype(np.float32))
    np.testing.assert_array_equal(found["1.ffn.base"], tensors["layers.1.hc_ffn_base"])


def test_a_missing_shard_and_a_tensor_that_is_not_in_its_shard(tmp_path: Path) -> None:
    weight_map = shard(tmp_path, checkpoint(DEEPSEEK))
    moved = {
        **weight_map,
        "layers.0.hc_attn_fn": next(f for f in weight_map.values() if f != weight_map["layers.0.hc_attn_fn"]),
    }
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(InputError, match=r"layers\.0\.hc_attn_fn is not in the shard"):
        site_parameters(tmp_path, 0, "attn", N, H)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / weight_map["layers.0.hc_attn_fn"]).unlink()
    with pytest.raises(InputError, match="cannot be read") as caught:
        site_parameters(tmp_path, 0, "attn", N, H)
    assert weight_map["layers.0.hc_attn_fn"] in caught.value.where


@pytest.mark.parametrize("file", ["../secret.safetensors", "sub/a.safetensors", "", 3])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path, file: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"layers.0.hc_attn_fn": file}}))
    with pytest.raises(InputError, match="shards lie beside the index"):
        WeightFile(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_malformed_index(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(InputError, match="index cannot be read"):
        WeightFile(tmp_path)


# ---- files --------------------------------------------------------------------------------------------------
def test_a_folder_with_one_file(tmp_path: Path) -> None:
    path = save(tmp_path, checkpoint(DEEPSEEK), "only.safetensors")
    assert WeightFile(tmp_path).path == path
    save(tmp_path, {"w": np.ones(3, np.float32)}, "second.safetensors")
    with pytest.raises(InputError, match="holds 2"):
        WeightFile(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("absent.safetensors", None, "no such file"),
        ("model.bin", b"x", r"kind \.bin"),
        ("cut.safetensors", b"\x08\0\0\0\0\0\0\0{", "cannot be read"),
        ("empty.safetensors", b"", "cannot be read"),
        ("cut.npz", b"PK\x03\x04", "cannot be read"),
        ("empty.npz", b"", "cannot be read"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, data: bytes | None, what: str) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InputError, match=what) as caught:
        WeightFile(path)
    assert caught.value.code == "I-FILE" and caught.value.hints


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("a pickle ran",))

    tensors = {**checkpoint(DEEPSEEK), "layers.0.hc_attn_fn": np.array([Trap()], dtype=object)}
    path = tmp_path / "trap.npz"
    np.savez(path, allow_pickle=True, **tensors)
    with pytest.raises(InputError, match=r"layers\.0\.hc_attn_fn cannot be read"):
        site_parameters(path, 0, "attn", N, H)


def test_an_array_by_itself_is_no_archive(tmp_path: Path) -> None:
    with (tmp_path / "one.npz").open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(InputError, match="holds one array"):
        WeightFile(tmp_path / "one.npz")


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, checkpoint(DEEPSEEK))
    archive = save(tmp_path, checkpoint(DEEPSEEK), "model.npz")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(EnvironmentFault, match="not installed") as caught:
        WeightFile(path)
    assert caught.value.code == "E-NO-SAFETENSORS" and "mhcgen[safetensors]" in caught.value.hints[0]
    assert site_parameters(archive, 0, "attn", N, H)["scale"].shape == (3,)


def test_a_name_that_the_file_lacks(tmp_path: Path) -> None:
    weights = WeightFile(save(tmp_path, checkpoint(DEEPSEEK)))
    assert "hc_head_fn" in weights and "nothing" not in weights
    with pytest.raises(KeyError):
        weights.read("nothing")
