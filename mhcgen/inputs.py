"""Inputs for a Program: reproducible numbers, inputs chosen to tell right from wrong, and poison.

The numbers come from a counter-based generator written out here (SplitMix64 on the element index), so they
are the same for every version of numpy, in any order and on any machine. The discriminating inputs each
separate one known mistake of hyper-connection kernels from the right answer by far more than rounding does;
random inputs separate few of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mhcgen.combs import comb_kind
from mhcgen.errors import UsageError
from mhcgen.ir import Program, Stage
from mhcgen.values import plain

if TYPE_CHECKING:
    from mhcgen.aim import Aim, Site

AnyArray = npt.NDArray[np.generic]
Inputs = dict[str, AnyArray]
Float64 = npt.NDArray[np.float64]

_NUMPY: dict[str, np.dtype[np.generic]] = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "int32": np.dtype(np.int32),
}
_CHUNK = 1 << 20


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """The numpy dtype that carries a Program's dtype (bf16, fp8 by ml_dtypes); KeyError if unknown."""
    return _NUMPY[name]


# --- the generator ----------------------------------------------------------------------------------------


def splitmix64(key: int, start: int, count: int) -> npt.NDArray[np.uint64]:
    """Outputs number `start` to `start + count - 1` of SplitMix64 seeded with `key` (mod 2^64).

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014: the i-th output
    is the mix function of key + (i + 1) * golden gamma, so any element is computed from its index alone.
    """
    with np.errstate(over="ignore"):
        index = np.arange(start + 1, start + count + 1, dtype=np.uint64)
        z = np.uint64(key % 2**64) + index * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def key_of(name: str, seed: int) -> int:
    """Generator key of a tensor: FNV-1a of its name, mixed with the seed."""
    digest = 0xCBF29CE484222325
    for byte in name.encode():
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return int(splitmix64(digest, seed % 2**32, 1)[0])


def uniform(name: str, seed: int, shape: tuple[int, ...], dtype: str = "fp32", factor: float = 1.0) -> AnyArray:
    """Numbers in [-1, 1) times `factor`, mean 0, C-contiguous.

    An odd multiple of 2^-24 is drawn from the top 24 bits of each output, so the set of values is symmetric
    about 0 and exact in fp32; narrower dtypes round it to nearest even, and what would round to +1 becomes
    the largest number below 1.

    Args:
        name: names the stream of numbers, usually the tensor's name.
        seed: any integer; taken mod 2^32.
        shape: concrete shape.
        dtype: a Program's float dtype.
        factor: multiplied in fp32, before rounding to dtype.
    """
    size = int(np.prod(shape, dtype=np.int64))
    out = np.empty(size, dtype=_NUMPY[dtype])
    bits = {"bf16": 8, "fp16": 11}.get(dtype, 24)
    below_one = np.float32(1.0 - 2.0**-bits)
    key = key_of(name, seed)
    for start in range(0, size, _CHUNK):
        count = min(_CHUNK, size - start)
        top = (splitmix64(key, start, count) >> np.uint64(40)).astype(np.int64)
        unit = ((2 * top + 1 - 2**24) * 2.0**-24).astype(np.float32)
        out[start : start + count] = (np.minimum(unit, below_one) * np.float32(factor)).astype(out.dtype)
    return out.reshape(shape)


def make_inputs(program: Program, tokens: int, seed: int = 0, kind: str = "uniform") -> Inputs:
    """An array for every input and parameter of a Program, in its dtype and shape, C-contiguous.

    Args:
        program: an unfused Program.
        tokens: T >= 0.
        seed: an integer; another seed gives other numbers, and equal arguments give equal bytes, always.
        kind: `uniform`: each tensor uniform in [-1, 1), the projection weights fn by 3/sqrt(K), so that mixes are
            of order 1.

    Raises:
        UsageError: `U-OPTION`, unknown kind, or a seed that is no integer; `U-TOKENS`, no integer >= 0.
    """
    if kind != "uniform":
        raise UsageError("U-OPTION", f"kind must be uniform, got {kind!r}", where="kind", hints=("leave it out",))
    tokens, seed = _integer("tokens", tokens, "U-TOKENS"), _integer("seed", seed, "U-OPTION")
    if tokens < 0:
        raise UsageError("U-TOKENS", f"tokens must be >= 0, got {tokens}", where="tokens", hints=("for example 8",))
    weights = {stage.operand("fn") for stage in program.stages_of_kind("project")}
    found: Inputs = {}
    for tensor in program.of_role("input", "parameter"):
        shape = program.shape(tensor.name, tokens)
        factor = 3.0 / shape[-1] ** 0.5 if tensor.name in weights else 1.0
        found[tensor.name] = uniform(tensor.name, seed, shape, tensor.dtype, factor)
    return found


def _integer(field: str, value: object, code: str) -> int:
    """Any kind of integer, but no truth value."""
    value = plain(field, value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(code, f"{field} must be an integer, got {value!r}", where=field, hints=("give an integer",))
    return value


# --- discriminating inputs --------------------------------------------------------------------------------


def d1(aim: Aim) -> Inputs | None:
    """Comb logits of a cyclic permutation, shift 1 or n-1 by token: comb against comb transposed.

    The two differ by about 1. Needs n >= 3, since a 2 x 2 doubly stochastic matrix is symmetric, and a kind of
    matrix that comes near a cycle (a Kronecker product of symmetric ones does not).
    """
    shifts = [1 if token % 2 == 0 else aim.n - 1 for token in range(aim.tokens)]
    stages = aim.matrices()
    if aim.n < 3 or not stages or any(comb_kind(stage).aim(aim.n, 1) is None for stage in stages):
        return None

    def logits(stage: Stage) -> Float64:
        made = [comb_kind(stage).aim(aim.n, shift) for shift in shifts]
        return np.array(made, dtype=np.float64).reshape(aim.tokens, comb_kind(stage).logits(aim.n))

    return aim.with_comb(logits)


def d3(aim: Aim) -> Inputs | None:
    """Streams about half the root of the largest eps: which eps went where.

    At an RMS eps of 1e-6 and an hc eps of 1e-2 the inverse RMS is 20.0, or 8.9 with the two mixed up. None
    where all eps of the Program are equal: then nothing can tell.
    """
    eps = {
        float(stage.attr(key)) for stage in aim.program.stages for key, _ in stage.attrs if key in ("eps", "pre_eps")
    }
    if len(eps) < 2:
        return None
    done = [aim.set_magnitude(site, max(eps) ** 0.5 / 2, 0.25) for site in (*aim.sites, *aim.norms)]
    return aim.finish() if any(done) else None


def d4(aim: Aim) -> Inputs | None:
    """Streams of the size at which the RMS eps weighs as much: 1/rms is 707.1 at 1e-6 in the root, 999.0 outside."""
    done = [site.eps > 0 and aim.set_magnitude(site, aim.small(site), 0.0) for site in (*aim.sites, *aim.norms)]
    return aim.finish() if any(done) else None


def d5(aim: Aim) -> Inputs | None:
    """Comb logits -1e4 in the last column, else 0: `sum + eps` ends at 1/n throughout, a clamp does not.

    For matrices that are normalised with an added eps.
    """

    def adds_eps(m: Stage) -> bool:
        linear = m.kind == "sinkhorn" and m.option("domain", "linear") == "linear"
        return linear and m.option("eps_mode", "add") == "add" and m.option("start", "softmax") != "exp"

    stages = aim.matrices()
    if aim.n < 2 or not stages or not all(adds_eps(stage) for stage in stages):
        return None
    comb = np.zeros((aim.tokens, aim.n, aim.n))
    comb[:, :, -1] = -1e4
    return aim.with_comb(lambda stage: comb)


def d8(aim: Aim) -> Inputs | None:
    """Comb logits about 89: without max-subtraction fp32 exp overflows to infinity and then NaN."""
    return aim.around(89.0)


def deep(aim: Aim) -> Inputs | None:
    """Comb logits about -200: without the row maximum, or with one that counts padding as 0, exp is 0 throughout."""
    return aim.around(-200.0)


def slow(aim: Aim) -> Inputs | None:
    """Comb logits 0 on and below the diagonal, -9 above: one iteration too few or too many.

    What stands above the diagonal must vanish for the sums to be 1, and iterations drive it out only as 1 over
    their number; random logits have converged to the last bit long before the last iteration.
    """
    stages = [stage for stage in aim.matrices() if stage.kind == "sinkhorn"]
    if aim.n < 2 or not stages or len(stages) < len(aim.matrices()):
        return None
    comb = np.broadcast_to(-9.0 * np.triu(np.ones((aim.n, aim.n)), 1), (aim.tokens, aim.n, aim.n))
    return aim.with_comb(lambda stage: comb)


def d9(aim: Aim) -> Inputs | None:
    """x = +1, -1, ... and fn = 1 + 2^-12, 1, ...: products sum to K/2 * 2^-12, or 0 in TF32 or bf16.

    Needs a projection with fp32 weights in the Program, and K even.
    """
    done = False
    for stage in aim.program.stages_of_kind("project", "project_streams"):
        fn, name = stage.operand("fn"), stage.operand("x")
        hidden, k = aim.program.dim("H"), aim.program.shape(fn, 0)[1]
        if aim.program.tensor(fn).dtype != "fp32" or k % 2 or fn not in aim.values:
            continue
        odd = np.arange(k) % 2
        one_row = np.resize(1.0 - 2.0 * odd, aim.n * hidden)  # of streams one by one, the same for each
        pattern = np.broadcast_to(one_row, (aim.tokens, aim.n * hidden))
        if aim.set_streams(name, pattern.reshape(aim.tokens, aim.n, hidden)):
            aim.values[fn] = np.broadcast_to(1.0 + 2.0**-12 * (1 - odd), aim.values[fn].shape)
            done = True
    return aim.finish() if done else None


def d10(aim: Aim) -> Inputs | None:
    """Streams, branch output and mixes of token t times 2^(t mod 32): a row that uses another row's norm.

    In fp16 the power is t mod 10, so that the weighted sums stay finite.
    """
    per_token = [
        tensor
        for tensor in aim.program.of_role("input")
        if tensor.shape[0] == "T" and aim.shape_of(tensor.name)[-1] in ("H", "R")
    ]
    if not (aim.sites or aim.norms) or not per_token:
        return None
    period = 10 if any(tensor.dtype == "fp16" for tensor in per_token) else 32
    power = np.ldexp(1.0, np.arange(aim.tokens) % period)
    for tensor in per_token:
        aim.values[tensor.name] = (aim.values[tensor.name].T * power).T
    return aim.finish()


def d12(aim: Aim) -> Inputs | None:
    """Streams and branch output all 0, mixes about the root of the RMS eps: eps lost gives NaN or infinity.

    Also an eps read with the wrong width (a double's bytes as a float is about -3e-19).
    """
    if min((site.eps for site in (*aim.sites, *aim.norms)), default=0.0) <= 0:
        return None
    for tensor in aim.program.of_role("input"):
        if aim.shape_of(tensor.name)[-1] == "H":
            aim.values[tensor.name] = np.zeros_like(aim.values[tensor.name])
    for site in aim.sites:
        if site.mixes is not None:
            aim.values[site.mixes] = aim.values[site.mixes] * aim.root(site, 0.0)
    return aim.finish()


def d15(aim: Aim) -> Inputs | None:
    """One NaN in the streams of the middle token: it must reach that token's results, no other token's."""
    for tensor in aim.program.of_role("input"):
        if aim.tokens and aim.shape_of(tensor.name) in (("T", "n", "H"), ("T", "H")):
            streams = aim.values[tensor.name].reshape(aim.tokens, -1, aim.program.dim("H"))
            streams[aim.tokens // 2, -1, streams.shape[2] // 2] = np.nan
            return aim.finish()
    return None


def extreme(aim: Aim) -> Inputs | None:
    """Every logit +-89, +-200 or +-1e4: overflow of exp, underflow of comb, division by tiny sums.

    Logits of the matrix stay within what fp32 can take where its kind starts from a bare exponential.
    """
    if not aim.sites and not aim.given and not aim.low_rank:
        return None

    def numbers(name: str, columns: int, limit: float) -> Float64:
        # 200 comes first: exp(-89) is a number that divides by itself, where there is no other.
        index = np.arange(aim.tokens)[:, None] + np.arange(columns)[None, :]
        magnitude = np.minimum(np.array([200.0, 1e4, 89.0])[index % 3], limit)
        signed: Float64 = magnitude * aim.signs(f"extreme {name}", aim.tokens, columns)
        return signed

    def wanted(site: Site) -> Float64:
        logits = numbers(f"{site.gates.name} logits", aim.columns(site) - 2 * aim.n, site.limit)
        return np.concatenate([numbers(site.gates.name, 2 * aim.n, np.inf), logits], axis=1)

    aim.set_logits(wanted)
    for stage in aim.low_rank:
        rows = aim.program.shape(stage.operand("mixes"), 0)[-1]
        aim.set_mixes(stage.operand("mixes"), aim.n * numbers(stage.name, rows, np.inf))
    for stage, name, first in aim.given if aim.tokens else ():
        logits = numbers(name, comb_kind(stage).logits(aim.n), comb_kind(stage).limit(stage))[0]
        aim.values[name][first : first + len(logits)] = logits
    return aim.finish()


def minus_infinity(aim: Aim) -> Inputs | None:
    """One -inf in base (comb logit 1, or 0 of one): that element is 0 + eps before normalising, without NaN.

    With given mixes and two tokens or more, the last token also has a row (of a matrix without rows, everything)
    that is -inf throughout: its comb is NaN, and no other token's is.
    """
    logits = [aim.columns(site) - 2 * aim.n for site in aim.sites]
    if aim.n < 2 or not logits or min(logits) < 1:
        return None

    def wanted(site: Site) -> Float64:
        columns = aim.columns(site)
        made = aim.random(f"minus infinity {site.gates.name}", aim.tokens, columns)
        if aim.tokens > 1:
            row = aim.n if columns == (2 + aim.n) * aim.n else columns - 2 * aim.n
            made[-1, columns - row :] = -np.inf
        return made

    aim.set_logits(wanted)
    for site in aim.sites:
        aim.values[site.gates.operand("base")][2 * aim.n + (aim.columns(site) > 2 * aim.n + 1)] = -np.inf
    return aim.finish()


#: Name -> maker. The D numbers are stable names with gaps: those missing are token counts, not values.
DISCRIMINATING: dict[str, Callable[[Aim], Inputs | None]] = {
    "D1": d1,
    "D3": d3,
    "D4": d4,
    "D5": d5,
    "D8": d8,
    "D9": d9,
    "D10": d10,
    "D12": d12,
    "D15": d15,
    "deep": deep,
    "slow": slow,
    "extreme": extreme,
    "-inf base": minus_infinity,
}


def discriminating(program: Program, tokens: int, name: str) -> Inputs | None:
    """The discriminating inputs of that name, or None where the Program has none (see each maker).

    Args:
        program: an unfused Program.
        tokens: T >= 0.
        name: a key of `DISCRIMINATING`.

    Raises:
        KeyError: unknown name.
    """
    from mhcgen.aim import Aim  # which needs this module

    return DISCRIMINATING[name](Aim(program, tokens))


# --- poison -----------------------------------------------------------------------------------------------

#: Bytes an output is filled with, by dtype. As 16-bit words those of floats are 0xfffd, a NaN in bf16 and fp16, and
#: two of them one in fp32: not the NaN that arithmetic makes, 0x7fff.. on a GPU and 0xffff.. negated. 0x80 is -128 in
#: int8, outside the symmetric range of q8, and negative in int32; 0xff is a NaN in fp8.
_POISON: dict[str, bytes] = {"int8": b"\x80", "int32": b"\x80", "fp8_e4m3": b"\xff"}
_POISON_FLOAT = b"\xfd\xff"


def poison(shape: tuple[int, ...], dtype: str) -> AnyArray:
    """An output array filled with bytes no stage writes; dtype is a Program's."""
    return np.tile(_poison_of(dtype), int(np.prod(shape, dtype=np.int64))).view(_NUMPY[dtype]).reshape(shape)


def _poison_of(dtype: str) -> npt.NDArray[np.uint8]:
    """The bytes of one element."""
    fill = np.frombuffer(_POISON.get(dtype, _POISON_FLOAT), np.uint8)
    return np.resize(fill, _NUMPY[dtype].itemsize)


def poisoned_mask(array: AnyArray) -> npt.NDArray[np.bool_]:
    """Where an array still holds the bytes of `poison`; same shape as the array."""
    names = {dtype: name for name, dtype in _NUMPY.items()}
    contiguous = np.ascontiguousarray(array)
    raw = contiguous.reshape(-1).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)
    return np.asarray(np.all(raw == _poison_of(names[array.dtype]), axis=-1), dtype=np.bool_)
