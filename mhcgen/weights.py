"""Parameters of sites and of the gated head, from checkpoints by their public names.

`.safetensors`, sharded checkpoints (`model.safetensors.index.json`) and `.npz` are read one tensor at a time. The
spelling of the names is found out from the names; a file that fits two spellings is refused. A site has

    fn [(2+n)n, n*H]   base [(2+n)n]   scale [3]

and the gated head fn [n, n*H], base [n], scale [1]. fp32 is read as it is and bf16 is widened, which is exact; every
other dtype is refused. Nothing falls back: a tensor that is absent or of another size is named with what was found
and what is wanted.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mhcgen.chain import at
from mhcgen.errors import EnvironmentFault, InputError, InputTypeError, UsageError
from mhcgen.trunk import SITES, site_names

Array = npt.NDArray[np.float32]
INDEX = "model.safetensors.index.json"
PARTS = ("fn", "base", "scale")


@dataclass(frozen=True)
class Spelling:
    """How a family of checkpoints names things; `{layer}`, `{site}` and `{part}` stand for what varies.

    Args:
        name: of the family.
        site: a site's parameters.
        head: the gated head's.
        norms: site to the name of the weight of its sub-layer's RMSNorm.
    """

    name: str
    site: str
    head: str
    norms: Mapping[str, str]


def _spellings() -> tuple[Spelling, ...]:
    own = {site: f"layers.{{layer}}.{site}_norm.weight" for site in SITES}
    hugging_face = {
        "attn": "layers.{layer}.input_layernorm.weight",
        "ffn": "layers.{layer}.post_attention_layernorm.weight",
    }

    def under(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
        return {site: prefix + name for site, name in names.items()}

    flat, modules = "layers.{layer}.hc_{site}_{part}", "layers.{layer}.{site}_hc.{part}"
    text = "model.language_model."
    return (
        Spelling("deepseek-v4", flat, "hc_head_{part}", own),
        Spelling("model", f"model.{flat}", "model.hc_head_{part}", under("model.", hugging_face)),
        Spelling("glm-5.3-flash", text + flat, text + "hc_head_{part}", under(text, hugging_face)),
        Spelling("modules", modules, "hc_head.hc_{part}", hugging_face),
        Spelling("model modules", f"model.{modules}", "model.hc_head.hc_{part}", under("model.", hugging_face)),
        Spelling("text modules", text + modules, text + "hc_head.hc_{part}", under(text, hugging_face)),
        Spelling(
            "gguf",
            "blk.{layer}.hc_{site}_{part}",
            "hc_head_{part}",
            {site: f"blk.{{layer}}.{site}_norm.weight" for site in SITES},
        ),
        Spelling(
            "mhcgen",
            "{layer}.{site}.{part}",
            "head.{part}",
            {site: f"{{layer}}.{site}.norm_weight" for site in SITES},
        ),
    )


SPELLINGS: tuple[Spelling, ...] = _spellings()


# ---- files --------------------------------------------------------------------------------------------------
class _Reader(Protocol):
    def names(self) -> tuple[str, ...]: ...
    def read(self, name: str) -> npt.NDArray[Any]: ...


class WeightFile:
    """Named tensors of a checkpoint, read when asked for.

    Args:
        path: a .safetensors or .npz file, an index of shards (`*.index.json`), or a folder with one of them.

    Raises:
        InputError: `I-FILE`, missing, malformed or of a kind that is not read.
        EnvironmentFault: `E-NO-SAFETENSORS`, the package is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | Path):
            raise InputError(
                "I-FILE", f"a file is named by its path, got {type(path).__name__}", where="weights",
                hints=("give a path, or tensors by name where those are taken",),
            )
        self.path = _locate(Path(path))
        self._reader: _Reader = _Npz(self.path) if self.path.suffix.lower() == ".npz" else _Safetensors(self.path)
        self.names = self._reader.names()
        self._known = frozenset(self.names)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def read(self, name: str) -> npt.NDArray[Any]:
        """One tensor in its own dtype, bf16 as ml_dtypes'; KeyError if the file has none of that name."""
        if name not in self._known:
            raise KeyError(name)
        return self._reader.read(name)


def _bad_file(path: Path, message: str, *hints: str) -> InputError:
    return InputError("I-FILE", message, where=str(path), hints=hints)


def _locate(path: Path) -> Path:
    """The file behind a path: itself, or what a folder holds."""
    try:
        path.stat()
    except (OSError, ValueError) as fault:
        if not isinstance(fault, FileNotFoundError):
            raise _bad_file(path, f"the file cannot be read: {fault}", "name a file you may read") from fault
    if path.is_dir():
        for candidate in (path / INDEX, path / "model.safetensors"):
            if candidate.is_file():
                return candidate
        found = sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            raise _bad_file(path, f"the folder holds {len(found)} .safetensors files and no {INDEX}", "name the file")
        return found[0]
    if not path.is_file():
        raise _bad_file(path, "there is no such file", "name a .safetensors or .npz file")
    suffix = path.suffix.lower()  # some systems spell any name in capitals
    if suffix not in (".safetensors", ".npz") and not path.name.lower().endswith(".index.json"):
        raise _bad_file(path, f"a file of kind {path.suffix or path.name} is not read", "use .safetensors or .npz")
    return path


class _Npz:
    """numpy's archive; nothing in it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            loaded = np.load(path, allow_pickle=False)
        except Exception as fault:  # what damaged bytes raise in numpy and zipfile has no common base
            raise _bad_file(path, f"the archive cannot be read: {fault}", "write it with numpy.savez") from fault
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise _bad_file(
                path, "the file holds one array, not an archive of named ones", "write it with numpy.savez"
            )
        self._arrays = loaded

    def names(self) -> tuple[str, ...]:
        return tuple(self._arrays.files)

    def read(self, name: str) -> npt.NDArray[Any]:
        try:
            array: npt.NDArray[Any] = self._arrays[name]
        except Exception as fault:  # likewise: a cut header, a password, a size that is not there
            raise _bad_file(self.path, f"{name} cannot be read: {fault}", "store plain numbers") from fault
        return array


class _Safetensors:
    """One file, or the shards that an index names; opened through the package, which checks the header."""

    def __init__(self, path: Path) -> None:
        try:
            import safetensors
        except ImportError as fault:
            raise EnvironmentFault(
                "E-NO-SAFETENSORS",
                "reading .safetensors needs the package safetensors, which is not installed",
                where=str(path),
                hints=("pip install 'mhcgen[safetensors]'",),
            ) from fault
        self._package = safetensors
        self._open: dict[Path, Any] = {}
        self.path = path
        indexed = path.suffix.lower() == ".json"
        self._shards = _shards(path) if indexed else dict.fromkeys(self._file(path).keys(), path)

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = self._package.safe_open(str(path), framework="numpy")
            except (OSError, self._package.SafetensorError) as fault:
                raise _bad_file(
                    path, f"the file cannot be read: {fault}", "it may be missing or cut short"
                ) from fault
        return self._open[path]

    def names(self) -> tuple[str, ...]:
        return tuple(self._shards)

    def read(self, name: str) -> npt.NDArray[Any]:
        shard = self._shards[name]
        opened = self._file(shard)
        if name not in opened.keys():  # noqa: SIM118 (an opened file is no mapping)
            raise _bad_file(shard, f"{name} is not in the shard that the index gives", "fetch the checkpoint again")
        part = opened.get_slice(name)
        dtype = part.get_dtype()
        if dtype == "BF16":
            return _bf16(shard, name, tuple(part.get_shape()))
        try:
            array: npt.NDArray[Any] = opened.get_tensor(name)
        except (TypeError, AttributeError, self._package.SafetensorError) as fault:
            raise _wrong_dtype(name, str(dtype)) from fault
        return array


def _shards(index: Path) -> dict[str, Path]:
    """Tensor name to its file, from an index. Shards lie beside it: an index does not lead out of its folder."""
    try:
        table = json.loads(index.read_text(encoding="utf-8"))
        listed = dict(table["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as fault:
        raise _bad_file(
            index, f"the index cannot be read: {fault!r}", "it is a JSON file with a weight_map"
        ) from fault
    for name, shard in listed.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard:
            raise _bad_file(index, f"the index gives {name} the file {shard!r}", "shards lie beside the index")
    return {name: index.parent / shard for name, shard in listed.items()}


def _bf16(path: Path, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """The tensor's bytes as ml_dtypes' bf16: not every version of the package knows the dtype in numpy."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(length))[name]["data_offsets"]
        file.seek(8 + length + start)
        data = file.read(end - start)
    return np.frombuffer(data, ml_dtypes.bfloat16).reshape(shape)


# ---- names --------------------------------------------------------------------------------------------------
def _pattern(template: str) -> re.Pattern[str]:
    text = re.escape(template)
    for field, group in (("layer", r"(?P<layer>\d+)"), ("site", "(?:attn|ffn)"), ("part", "(?:fn|base|scale)")):
        text = text.replace(re.escape(f"{{{field}}}"), group)
    return re.compile(text)


_PATTERNS = tuple((spelling, _pattern(spelling.site)) for spelling in SPELLINGS)


def find_spelling(weights: WeightFile) -> Spelling:
    """The spelling of a file's site parameters.

    Raises:
        InputError: `I-SPELLING`, none or more than one fits.
    """
    found: dict[str, tuple[Spelling, str]] = {}
    for spelling, pattern in _PATTERNS:
        first = next((name for name in weights.names if pattern.fullmatch(name)), None)
        if first is not None:
            found[spelling.name] = (spelling, first)
    if len(found) == 1:
        ((spelling, _),) = found.values()
        return spelling
    if found:
        raise InputError(
            "I-SPELLING",
            f"the file fits {len(found)} spellings of hyper-connection parameters, so which to read is unclear",
            where=str(weights.path),
            notes=tuple(f"{spelling.name}: {name}" for spelling, name in found.values()),
            hints=("keep the tensors of one spelling",),
        )
    raise InputError(
        "I-SPELLING",
        f"none of the file's {len(weights.names)} tensors is a site's hyper-connection parameter",
        where=str(weights.path),
        notes=tuple(f"{spelling.name}: {spelling.site}" for spelling in SPELLINGS),
        hints=("rename the tensors, or give the checkpoint that has them",),
    )


def layers_of(weights: WeightFile) -> tuple[int, ...]:
    """Numbers of the layers that have site parameters, ascending; `I-SPELLING` as in `find_spelling`."""
    pattern = _pattern(find_spelling(weights).site)
    matches = (pattern.fullmatch(name) for name in weights.names)
    return tuple(sorted({int(match["layer"]) for match in matches if match}))


# ---- parameters -----------------------------------------------------------------------------------------------
def site_parameters(
    path: str | Path | WeightFile,
    layer: int,
    site: str,
    streams: int,
    hidden: int,
    *,
    rows: int | None = None,
    norm: str | bool = False,
) -> dict[str, Array]:
    """`fn` [(2+n)n, n*H], `base` [(2+n)n] and `scale` [3] of one site, fp32 and C-contiguous.

    Args:
        path: a file, an index, a folder, or a WeightFile.
        layer: number of the layer.
        site: `attn` or `ffn`.
        streams: n.
        hidden: H.
        rows: mixes a token of a model that has not (2+n)n.
        norm: also read `norm_weight` [H]: True by the name that goes with the spelling, or a name of its own in
            which `{layer}` and `{site}` are filled in.

    Raises:
        UsageError: `U-SITE`; `U-OPTION`, a norm that is no such name.
        InputError: `I-FILE`, `I-SPELLING`, `I-TENSOR` (a tensor is absent or of another size).
        InputTypeError: `I-DTYPE`, neither fp32 nor bf16.
        EnvironmentFault: `E-NO-SAFETENSORS`.
    """
    if site not in SITES:
        raise UsageError(
            "U-SITE",
            f"site must be {' or '.join(SITES)}, got {site!r}",
            where="--site",
            hints=(f"choose one of {', '.join(SITES)}",),
        )
    weights = path if isinstance(path, WeightFile) else WeightFile(path)
    spelling = find_spelling(weights)
    rows = (2 + streams) * streams if rows is None else rows
    wanted = {"fn": (rows, streams * hidden), "base": (rows,), "scale": (3,)}
    found = {
        part: _parameter(weights, spelling.site.format(layer=layer, site=site, part=part), shape)
        for part, shape in wanted.items()
    }
    norm = norm_wish(norm if isinstance(norm, bool) else {site: norm}, site)
    if norm:
        name = (spelling.norms[site] if norm is True else norm).format(layer=layer, site=site)
        found["norm_weight"] = _parameter(weights, name, (hidden,))
    return found


def head_parameters(path: str | Path | WeightFile, streams: int, hidden: int) -> dict[str, Array]:
    """`fn` [n, n*H], `base` [n] and `scale` [1] of the gated head; raises as `site_parameters` does."""
    weights = path if isinstance(path, WeightFile) else WeightFile(path)
    own = find_spelling(weights).head
    heads = [
        head
        for head in dict.fromkeys(spelling.head for spelling in SPELLINGS)
        if any(head.format(part=part) in weights for part in PARTS)
    ]
    if len(heads) > 1:
        raise InputError(
            "I-SPELLING",
            "the file has more than one gated head, so which to read is unclear",
            where=str(weights.path),
            notes=tuple(head.format(part="fn") for head in heads),
            hints=("keep the tensors of one spelling",),
        )
    head = heads[0] if heads else own
    wanted = {"fn": (streams, streams * hidden), "base": (streams,), "scale": (1,)}
    return {part: _parameter(weights, head.format(part=part), shape) for part, shape in wanted.items()}


def norm_wish(norms: Mapping[str, str] | bool, site: str) -> str | bool:
    """The norm weight that is wished for a site: none, by the spelling's name, or by one of its own.

    Raises:
        UsageError: `U-OPTION`, the site has no name, or one in which more than `{layer}` and `{site}` is open.
    """
    if isinstance(norms, bool):
        return norms
    wish = norms.get(site) if isinstance(norms, Mapping) else norms
    try:
        if isinstance(wish, str) and isinstance(norms, Mapping) and wish.format(layer=0, site=site):
            return wish
    except (AttributeError, LookupError, TypeError, ValueError):  # what str.format finds in other braces
        pass
    raise UsageError(
        "U-OPTION",
        f"norms has no name of a tensor for site {site}: {wish!r}",
        where="norms",
        hints=("map each site to a name with {layer} and {site} in it, or give True for the spelling's own",),
    )


def trunk_parameters(
    path: str | Path | WeightFile,
    layers: int,
    streams: int,
    hidden: int,
    *,
    exit: str,
    rows: int | None = None,
    norm: Mapping[str, str] | bool = False,
) -> dict[str, Array]:
    """Every parameter of a trunk by its name in a trunk Program: `0.attn.fn`, ..., `head.scale`.

    Args:
        path, streams, hidden, rows: as in `site_parameters`.
        layers: layers 0 to layers - 1 are read; others (MTP layers, say) are left alone.
        exit: `head` reads the gated head too, others have no parameters.
        norm: also read norm weights: True by the spelling's names, or site to a name with `{layer}`.

    Raises: as `site_parameters`.
    """
    weights = path if isinstance(path, WeightFile) else WeightFile(path)
    found: dict[str, Array] = {}
    for name in site_names(layers):
        layer, site = name.split(".")
        wish = norm_wish(norm, site)
        read = site_parameters(weights, int(layer), site, streams, hidden, rows=rows, norm=wish)
        found.update({at(name, part): array for part, array in read.items()})
    if exit == "head":
        found.update({at("head", part): a for part, a in head_parameters(weights, streams, hidden).items()})
    return found


def _parameter(weights: WeightFile, name: str, wanted: tuple[int, ...]) -> Array:
    """A tensor in the wanted shape and fp32.

    Vectors are checked by element count, since checkpoints differ in dimensions of size 1. A matrix must have its
    rows first: a transposed one has the same count and would compute something else.
    """
    if name not in weights:
        near = difflib.get_close_matches(name, weights.names, n=1)
        raise InputError(
            "I-TENSOR",
            f"tensor {name} is missing; fp32 or bf16 {list(wanted)} is wanted",
            where=str(weights.path),
            notes=(f"layers with hyper-connections: {_ranges(layers_of(weights))}",),
            hints=((f"the nearest name is {near[0]}",) if near else ("give the checkpoint that has it",)),
        )
    array = weights.read(name)
    count = int(np.prod(wanted))
    rows_first = len(wanted) == 1 or array.ndim == 1 or array.shape[:1] == wanted[:1]
    if array.size != count or not rows_first:
        turned = (
            ("it may be stored transposed, [inputs, mixes]; store [mixes, inputs]",)
            if array.shape == wanted[::-1] != wanted
            else ("the streams and hidden size asked for must be those of the checkpoint",)
        )
        raise InputError(
            "I-TENSOR",
            f"tensor {name} has shape {list(array.shape)} ({array.size} elements), "
            f"and {list(wanted)} ({count} elements) is wanted",
            where=str(weights.path),
            hints=turned,
        )
    if array.dtype.name not in ("float32", "bfloat16"):
        raise _wrong_dtype(name, array.dtype.name)
    return np.ascontiguousarray(array.astype(np.float32)).reshape(wanted)


def _wrong_dtype(name: str, dtype: str) -> InputTypeError:
    hint = "store it as fp32, or as bf16 in .safetensors"
    if dtype.startswith("void"):
        hint = ".npz does not carry bf16: it comes back as raw bytes, so store fp32 there, or bf16 in .safetensors"
    return InputTypeError(
        "I-DTYPE",
        f"tensor {name} has dtype {dtype}; fp32 is read, bf16 is widened, nothing else is",
        where=name,
        hints=(hint,),
    )


def _ranges(numbers: tuple[int, ...]) -> str:
    """`0-2, 5` of (0, 1, 2, 5)."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
