// The host's stand-in for NVIDIA's cuda_bf16.h: storage types and conversions, no arithmetic.
// Arithmetic on bf16 would round differently from float arithmetic; emissions convert to float first, and the
// deleted operators make sure of it.
#pragma once

struct __nv_bfloat16 {
  unsigned short mhc_bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float value);
  operator float() const;
};
typedef __nv_bfloat16 nv_bfloat16;

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
typedef __nv_bfloat162 nv_bfloat162;

MHC_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.mhc_bits; }
MHC_INLINE short __bfloat16_as_short(__nv_bfloat16 v) { return static_cast<short>(v.mhc_bits); }
MHC_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __nv_bfloat16 result;
  result.mhc_bits = bits;
  return result;
}
MHC_INLINE __nv_bfloat16 __short_as_bfloat16(short bits) {
  return __ushort_as_bfloat16(static_cast<unsigned short>(bits));
}

// Round to nearest, ties to even; every NaN becomes 0x7fff.
MHC_INLINE __nv_bfloat16 __float2bfloat16_rn(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return __ushort_as_bfloat16(0x7fff);
  const unsigned odd = bits >> 16 & 1u;
  return __ushort_as_bfloat16(static_cast<unsigned short>((bits + 0x7fffu + odd) >> 16));
}
MHC_INLINE __nv_bfloat16 __float2bfloat16(float value) { return __float2bfloat16_rn(value); }
// Toward zero: drops the low half, which cannot turn a finite value into an infinity.
MHC_INLINE __nv_bfloat16 __float2bfloat16_rz(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return __ushort_as_bfloat16(0x7fff);
  return __ushort_as_bfloat16(static_cast<unsigned short>(bits >> 16));
}
MHC_INLINE float __bfloat162float(__nv_bfloat16 v) {
  return __uint_as_float(static_cast<unsigned>(v.mhc_bits) << 16);
}
inline __attribute__((always_inline)) __nv_bfloat16::__nv_bfloat16(float value)
    : mhc_bits(__float2bfloat16_rn(value).mhc_bits) {}
inline __attribute__((always_inline)) __nv_bfloat16::operator float() const { return __bfloat162float(*this); }

// In the pairs, x is the low half.
MHC_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return {low, high}; }
MHC_INLINE __nv_bfloat162 make_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) { return {low, high}; }
MHC_INLINE __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
MHC_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
MHC_INLINE __nv_bfloat162 __float2bfloat162_rn(float v) { return __floats2bfloat162_rn(v, v); }
MHC_INLINE __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 v) { return {v, v}; }
MHC_INLINE float2 __bfloat1622float2(__nv_bfloat162 v) {
  return make_float2(__bfloat162float(v.x), __bfloat162float(v.y));
}
MHC_INLINE float __low2float(__nv_bfloat162 v) { return __bfloat162float(v.x); }
MHC_INLINE float __high2float(__nv_bfloat162 v) { return __bfloat162float(v.y); }
MHC_INLINE __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
MHC_INLINE __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }

__nv_bfloat16 operator+(__nv_bfloat16, __nv_bfloat16) = delete;
__nv_bfloat16 operator-(__nv_bfloat16, __nv_bfloat16) = delete;
__nv_bfloat16 operator*(__nv_bfloat16, __nv_bfloat16) = delete;
__nv_bfloat16 operator/(__nv_bfloat16, __nv_bfloat16) = delete;
