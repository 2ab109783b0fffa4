"""Each intrinsic of the host prelude against numpy, at the values where implementations differ."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from host_cases import signature, source

from mhcgen.backends.host import HostModule
from mhcgen.errors import CompileError

SIGNATURES = (
    signature("arithmetic", a="const float*", b="const float*", c="const float*", out="float*", n="int"),
    signature("doubles", a="const double*", b="const double*", out="double*", n="int"),
    signature("extremes", a="const float*", b="const float*", out="float*", n="int"),
    signature("to_integers", a="const float*", b="const double*", out="int*", wide="long long*", n="int"),
    signature("from_integers", a="const int*", b="const long long*", out="float*", wide="double*", n="int"),
    signature("bits", a="const float*", b="const double*", out="unsigned*", wide="double*", n="int"),
    signature("narrow", a="const float*", b="__nv_bfloat16*", h="__half*", q="unsigned char*", n="int"),
    signature(
        "widen",
        b="const __nv_bfloat16*",
        h="const __half*",
        q="const unsigned char*",
        out="float*",
        n="int",
    ),
    signature("approximate", a="const float*", out="float*", n="int"),
    signature("shuffles", f="float*", d="double*", l="long long*", u="unsigned*"),
    signature("block_votes", out="int*"),
    signature(
        "atomics",
        i="int*",
        u="unsigned*",
        l="unsigned long long*",
        f="float*",
        d="double*",
        tickets="unsigned*",
    ),
)

Array = npt.NDArray[Any]
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.5, 2.5, 0.1, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-38, 1e-45, -1e-45, 65519.0, 65520.0],
    np.float32,
)


@pytest.fixture(scope="module")
def host() -> HostModule:
    return HostModule(source("intrinsics"), SIGNATURES, name="intrinsics")


def run(host: HostModule, kernel: str, n: int, *args: Array) -> None:
    """One element per thread."""
    host.launch(kernel, -(-n // 256), 256, [*args, n]).raise_if_found()


def same(got: Array, want: Array) -> None:
    """Equal bits; NaN by position, since x86 and GPU NaNs differ."""
    want = np.asarray(want, got.dtype)
    nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), nan)
    word = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(got[~nan].view(word), want[~nan].view(word))


def grid_of(values: Array) -> tuple[Array, Array]:
    """All pairs, flattened."""
    a, b = np.meshgrid(values, values, indexing="ij")
    return a.ravel().copy(), b.ravel().copy()


def random_floats(count: int, seed: int, dtype: type = np.float32) -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 2.0 ** rng.integers(-20, 20, count)).astype(dtype)


def rounded(exact: Fraction) -> np.float32:
    """The nearest float, ties to even, of an exact value in the normal range."""
    near = np.float32(float(exact))
    below, above = np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))
    distance = {v: abs(Fraction(float(v)) - exact) for v in (below, near, above)}
    least = min(distance.values())
    best = [v for v, d in distance.items() if d == least]
    return min(best, key=lambda v: int(v.view(np.uint32)) & 1)


def test_float_arithmetic_rounds_to_nearest_without_contraction(host: HostModule) -> None:
    pairs = grid_of(SPECIAL)
    a = np.concatenate([pairs[0], random_floats(4000, 1)])
    b = np.concatenate([pairs[1], random_floats(4000, 2)])
    c = np.concatenate([np.ones_like(pairs[0]), random_floats(4000, 3)])
    out = np.zeros((a.size, 9), np.float32)
    run(host, "arithmetic", a.size, a, b, c, out)
    with np.errstate(all="ignore"):
        one = np.float32(1)
        for column, want in enumerate([a + b, a - b, a * b, a / b, None, one / a, np.sqrt(a), a * b + c, a * b + c]):
            if want is not None:
                same(out[:, column], want)
    fused = np.array([rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in
                      zip(a[-500:], b[-500:], c[-500:], strict=True)])  # fmt: skip
    same(out[-500:, 4], fused)
    assert (out[-500:, 4] != out[-500:, 7]).sum() > 20  # the inputs tell fused from unfused


def test_double_arithmetic(host: HostModule) -> None:
    a, b = random_floats(2000, 4, np.float64), random_floats(2000, 5, np.float64)
    a[:4] = [0.0, np.inf, np.nan, 1e-320]
    out = np.zeros((a.size, 8))
    run(host, "doubles", a.size, a, b, out)
    with np.errstate(all="ignore"):
        narrowed = a.astype(np.float32).astype(np.float64)
        for column, want in enumerate([a + b, a - b, a * b, a / b, 1 / a, np.sqrt(a), narrowed]):
            same(out[:, column], want)
    for x, y, error in zip(a[4:200], b[4:200], out[4:200, 7], strict=True):
        assert Fraction(x) * Fraction(y) == Fraction(x * y) + Fraction(error)


def test_minimum_and_maximum_prefer_numbers_and_order_zeros(host: HostModule) -> None:
    a, b = grid_of(SPECIAL)
    out = np.zeros((a.size, 8), np.float32)
    run(host, "extremes", a.size, a, b, out)
    low, high = np.fmin(a, b), np.fmax(a, b)
    zeros = (a == 0) & (b == 0)
    negative = np.signbit(a), np.signbit(b)
    low[zeros] = np.where(negative[0] | negative[1], np.float32(-0.0), np.float32(0.0))[zeros]
    high[zeros] = np.where(negative[0] & negative[1], np.float32(-0.0), np.float32(0.0))[zeros]
    for column in (0, 2, 4):
        same(out[:, column], low)
        same(out[:, column + 1], high)
    same(out[:, 6], np.abs(a))
    same(out[:, 7], np.rint(a))


def test_conversion_to_integers_saturates(host: HostModule) -> None:
    edges = [0.5, 1.5, 2.5, -0.5, -1.5, 2147483520.0, 2147483648.0, -2147483648.0, 4294967040.0, 1e30, -1e30]
    a = np.concatenate([SPECIAL, np.array(edges, np.float32)])
    b = a.astype(np.float64)
    b[3] = -2147483648.9
    out, wide = np.zeros((a.size, 8), np.int32), np.zeros((a.size, 2), np.int64)
    run(host, "to_integers", a.size, a, b, out, wide)
    lowest = -(2**31)

    def want(value: float, low: int, high: int, nan: int) -> int:
        if np.isnan(value):
            return nan
        if np.isinf(value):
            return high if value > 0 else low
        return min(max(int(value), low), high)

    for x, y, row, pair in zip(a.astype(np.float64), b, out, wide, strict=True):
        for column, how in enumerate([np.rint, np.trunc, np.floor, np.ceil]):
            assert row[column] == want(how(x), lowest, 2**31 - 1, 0), (x, how)
        for column, how in ((4, np.rint), (5, np.trunc)):
            assert row[column].view(np.uint32) == want(how(x), 0, 2**32 - 1, 0), (x, how)
        for column, how in ((6, np.rint), (7, np.trunc)):
            assert row[column] == want(how(y), lowest, 2**31 - 1, lowest), (y, how)
        assert pair[0] == want(np.rint(x), -(2**63), 2**63 - 1, -(2**63))
        assert pair[1] == want(np.trunc(y), -(2**63), 2**63 - 1, -(2**63))


def test_conversion_from_integers_rounds_to_nearest(host: HostModule) -> None:
    a = np.array([0, 1, -1, 2**24 + 1, 2**24 + 3, 2**31 - 1, -(2**31), -5], np.int32)
    b = a.astype(np.int64) * (2**31 + 12345)
    out, wide = np.zeros((a.size, 3), np.float32), np.zeros(a.size)
    run(host, "from_integers", a.size, a, b, out, wide)
    same(out[:, 0], a.astype(np.float32))
    same(out[:, 1], a.view(np.uint32).astype(np.float32))
    same(out[:, 2], b.astype(np.float32))
    same(wide, b.astype(np.float64))


def test_bit_functions(host: HostModule) -> None:
    a = np.concatenate([SPECIAL, random_floats(100, 6)])
    b = random_floats(a.size, 7, np.float64)
    out, wide = np.zeros((a.size, 12), np.uint32), np.zeros((a.size, 2))
    run(host, "bits", a.size, a, b, out, wide)
    for row, word, high_low in zip(out.tolist(), a.view(np.uint32).tolist(), b.view(np.uint64).tolist(), strict=True):
        signed = word - 2**32 if word >> 31 else word
        assert row[:2] == [word, word]
        assert row[2] == bin(word).count("1")
        assert row[3] == 32 - word.bit_length()
        assert row[4] == (word & -word).bit_length()
        assert row[5:7] == [high_low >> 32, high_low & 0xFFFFFFFF]
        assert row[7] == (word & 0xFFFF) | 0x44330000
        assert row[8] == (word & 0xFF) * 0x01010100 | (0xFF if word >> 31 else 0)
        assert row[9] == word >> 16
        assert row[10] == (min(signed, 5) ^ max(signed, -5)) % 2**32
        assert row[11] == (min(word, 77) + word) % 2**32
    np.testing.assert_array_equal(wide.view(np.uint64), np.stack([b, b], 1).view(np.uint64))


def test_narrow_formats_round_to_nearest_even(host: HostModule) -> None:
    high = np.arange(2**16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF], np.uint32)
    a = (high[:, None] | low).ravel().view(np.float32)
    b, h = np.zeros(a.size, ml_dtypes.bfloat16), np.zeros(a.size, np.float16)
    q = np.zeros((a.size, 2), np.uint8)
    run(host, "narrow", a.size, a, b, h, q)
    nan = np.isnan(a)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(b.view(np.uint16), np.where(nan, 0x7FFF, a.astype(b.dtype).view(np.uint16)))
        np.testing.assert_array_equal(h.view(np.uint16), np.where(nan, 0x7FFF, a.astype(np.float16).view(np.uint16)))
        saturated = np.clip(a, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(q[:, 0], np.where(nan, 0x7F, saturated))
        open_ended = a.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        np.testing.assert_array_equal(q[~nan, 1], open_ended[~nan])


def test_narrow_formats_widen_exactly(host: HostModule) -> None:
    codes = np.arange(2**16, dtype=np.uint16)
    b, h = codes.view(ml_dtypes.bfloat16), codes.view(np.float16)
    q = codes.astype(np.uint8)
    out = np.zeros((codes.size, 3), np.float32)
    run(host, "widen", codes.size, b, h, q, out)
    same(out[:, 0], b.astype(np.float32))
    same(out[:, 1], h.astype(np.float32))
    same(out[:, 2], q.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_host_halves_of_the_approximations(host: HostModule) -> None:
    a = np.concatenate([SPECIAL, random_floats(500, 8), np.array([-126.0, -126.5, -127.0, 127.5, 128.0], np.float32)])
    out = np.zeros((a.size, 3), np.float32)
    run(host, "approximate", a.size, a, out)
    with np.errstate(all="ignore"):
        same(out[:, 0], np.float32(1) / a)
        exact = np.exp2(a.astype(np.float64))
        flushed = np.where(exact < 2.0**-126, 0.0, exact)
        assert np.array_equal(np.isnan(out[:, 1]), np.isnan(a))
        good = ~np.isnan(a) & (a < 128)
        np.testing.assert_allclose(out[good, 1], flushed[good], rtol=2e-7)
        np.testing.assert_allclose(out[:, 2], 1 / np.sqrt(a.astype(np.float64)), rtol=6e-8)


def test_shuffles_and_votes(host: HostModule) -> None:
    lane = np.arange(32)
    f, d = np.zeros(64, np.float32), np.zeros(64)
    wide, u = np.zeros(64, np.int64), np.zeros(136, np.uint32)
    host.launch("shuffles", 1, 32, [f, d, wide, u]).raise_if_found()
    np.testing.assert_array_equal(f[:32], (lane + 33) % 32 * 1.5)
    np.testing.assert_array_equal(f[32:], (lane // 8 * 8 + 5) * 1.5)
    np.testing.assert_array_equal(d[:32], (lane ^ 6) + 0.25)
    # Crossing to a later group keeps the lane's own value; to an earlier one is allowed.
    np.testing.assert_array_equal(d[32:], np.where(lane < 16, lane, lane ^ 20) + 0.25)
    np.testing.assert_array_equal(wide[:32] - 10**10, np.where(lane >= 3, lane - 3, lane))
    np.testing.assert_array_equal(wide[32:] - 10**10, np.where(lane % 8 >= 3, lane - 3, lane))
    np.testing.assert_array_equal(u[:32], 100 + np.where(lane + 9 < 32, lane + 9, lane))
    np.testing.assert_array_equal(u[32:64], 100 + np.where(lane % 4 < 2, lane + 2, lane))
    assert set(u[64:96]) == {sum(1 << n for n in range(0, 32, 3))}
    assert set(u[96:128]) == {2}
    assert set(u[128:]) == {0b10101010}


def test_block_votes(host: HostModule) -> None:
    out = np.zeros((70, 3), np.int32)
    host.launch("block_votes", 1, 70, [out]).raise_if_found()
    assert (out == [56, 1, 1]).all()
    host.launch("block_votes", 1, 64, [out]).raise_if_found()
    assert (out[:64, 2] == 0).all()


@pytest.mark.parametrize("order", ["ascending", "random"])
def test_atomics(host: HostModule, order: str) -> None:
    i, u = np.zeros(1, np.int32), np.array([0, 0, 99, 0, 0, 0, 0xFFFFFFFF], np.uint32)
    wide, f, d = np.zeros(1, np.uint64), np.zeros(1, np.float32), np.zeros(1)
    tickets = np.full(66, 9, np.uint32)
    host.launch("atomics", 1, 64, [i, u, wide, f, d, tickets], order=order).raise_if_found()
    assert sorted(tickets[:64]) == list(range(64))
    assert tickets[64:].tolist() == [1, 1]
    assert (i[0], wide[0], f[0], d[0]) == (-2016, 64 << 40, 32.0, 16.0)
    assert u[[0, 1, 2, 5, 6]].tolist() == [64, 63, 3, 0xFFFFFFFF, 0xFFFF0000]
    if order == "ascending":
        assert u[[3, 4]].tolist() == [64, 63]


def test_vector_pairs_of_narrow_formats() -> None:
    """Pairs through raw memory: the x member is the low half."""
    text = source("intrinsics").split('extern "C" __global__ void pairs')
    body = 'extern "C" __global__ void pairs' + text[1].split('extern "C"')[0]
    body = body.replace("const float2* a, __nv_bfloat162* b, __half2* h, float4* out",
                        "const float* a_, unsigned* b_, unsigned* h_, float* out_")  # fmt: skip
    casts = (
        "const float2* a = (const float2*)a_; auto* b = (__nv_bfloat162*)b_; auto* h = (__half2*)h_; "
        "float4* out = (float4*)out_; AT;"
    )
    head = text[0].split('extern "C"')[0]
    host = HostModule(
        head + body.replace("AT;", casts),
        [signature("pairs", a_="const float*", b_="unsigned*", h_="unsigned*", out_="float*", n="int")],
    )
    a = np.array([[1.5, -2.25], [0.1, 1000.7]], np.float32)
    b, h, out = np.zeros(2, np.uint32), np.zeros(2, np.uint32), np.zeros((2, 4), np.float32)
    run(host, "pairs", 2, a, b, h, out)
    as_bf16, as_half = a.astype(ml_dtypes.bfloat16), a.astype(np.float16)
    np.testing.assert_array_equal(b, as_bf16.view(np.uint32).ravel())
    np.testing.assert_array_equal(h, as_half.view(np.uint32).ravel())
    np.testing.assert_array_equal(out, np.concatenate([as_bf16.astype(np.float32), as_half.astype(np.float32)], 1))


UNKNOWN = {
    "an approximate function": "o[0] = __expf(o[0]);",
    "libm": "o[0] = expf(o[0]);",
    "rsqrtf": "o[0] = rsqrtf(o[0]);",
    "a shuffle without a mask": "o[0] = __shfl_xor(o[0], 1);",
    "the mask of active lanes": "__syncwarp(__activemask());",
    "inline PTX": 'asm volatile("bar.sync 0;");',
    "e5m2": "o[0] = __nv_cvt_float_to_fp8(o[0], __NV_SATFINITE, __NV_E5M2);",
    "arithmetic on bf16": "__nv_bfloat16 v = __float2bfloat16_rn(o[0]); o[0] = v * v;",
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_the_host_cannot_do_does_not_compile(what: str) -> None:
    text = (
        "#include <cuda_bf16.h>\n#include <cuda_fp8.h>\n"
        f'extern "C" __global__ void k(float* o) {{\n{UNKNOWN[what]}\n}}'
    )
    with pytest.raises(CompileError) as caught:
        HostModule(text, [signature("k", o="float*")], name="unknown")
    assert "unknown.cu:4" in caught.value.notes[0] or "Assembler" in caught.value.notes[0]
