// The host's stand-in for NVIDIA's cuda_fp16.h: storage types and conversions, no arithmetic (see cuda_bf16.h).
#pragma once

struct __half {
  unsigned short mhc_bits;
  __half() = default;
  __half(float value);
  operator float() const;
};
typedef __half half;

struct alignas(4) __half2 {
  __half x, y;
};
typedef __half2 half2;

MHC_INLINE unsigned short __half_as_ushort(__half v) { return v.mhc_bits; }
MHC_INLINE short __half_as_short(__half v) { return static_cast<short>(v.mhc_bits); }
MHC_INLINE __half __ushort_as_half(unsigned short bits) {
  __half result;
  result.mhc_bits = bits;
  return result;
}
MHC_INLINE __half __short_as_half(short bits) { return __ushort_as_half(static_cast<unsigned short>(bits)); }

// Round to nearest, ties to even; subnormals kept, overflow to infinity, every NaN becomes 0x7fff.
MHC_INLINE __half __float2half_rn(float value) {
  const unsigned bits = __float_as_uint(value);
  const unsigned sign = bits >> 16 & 0x8000u;
  const unsigned magnitude = bits & 0x7fffffffu;
  unsigned half;
  if (magnitude > 0x7f800000u) {
    return __ushort_as_half(0x7fff);
  } else if (magnitude >= 0x477ff000u) {  // 65520, halfway between 65504 and the next step: ties to infinity
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14, the smallest normal of half
    const unsigned rebased = magnitude - ((127u - 15u) << 23);
    half = (rebased + 0xfffu + (rebased >> 13 & 1u)) >> 13;
  } else {
    // Subnormal: adding 0.5 leaves the value in units of 2^-24 in the low mantissa bits, rounded by the FPU.
    half = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3f000000u;
  }
  return __ushort_as_half(static_cast<unsigned short>(sign | half));
}
MHC_INLINE __half __float2half(float value) { return __float2half_rn(value); }
MHC_INLINE float __half2float(__half v) {
  const unsigned sign = static_cast<unsigned>(v.mhc_bits & 0x8000u) << 16;
  const unsigned exponent = v.mhc_bits >> 10 & 0x1fu;
  const unsigned mantissa = v.mhc_bits & 0x3ffu;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return __uint_as_float(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
  const float magnitude = __fmul_rn(static_cast<float>(mantissa), 5.9604644775390625e-8f);  // 2^-24, exact
  return __uint_as_float(sign | __float_as_uint(magnitude));
}
inline __attribute__((always_inline)) __half::__half(float value) : mhc_bits(__float2half_rn(value).mhc_bits) {}
inline __attribute__((always_inline)) __half::operator float() const { return __half2float(*this); }

// In the pairs, x is the low half.
MHC_INLINE __half2 __halves2half2(__half low, __half high) { return {low, high}; }
MHC_INLINE __half2 make_half2(__half low, __half high) { return {low, high}; }
MHC_INLINE __half2 __floats2half2_rn(float low, float high) { return {__float2half_rn(low), __float2half_rn(high)}; }
MHC_INLINE __half2 __float22half2_rn(float2 v) { return __floats2half2_rn(v.x, v.y); }
MHC_INLINE __half2 __float2half2_rn(float v) { return __floats2half2_rn(v, v); }
MHC_INLINE __half2 __half2half2(__half v) { return {v, v}; }
MHC_INLINE float2 __half22float2(__half2 v) { return make_float2(__half2float(v.x), __half2float(v.y)); }
MHC_INLINE float __low2float(__half2 v) { return __half2float(v.x); }
MHC_INLINE float __high2float(__half2 v) { return __half2float(v.y); }
MHC_INLINE __half __low2half(__half2 v) { return v.x; }
MHC_INLINE __half __high2half(__half2 v) { return v.y; }

__half operator+(__half, __half) = delete;
__half operator-(__half, __half) = delete;
__half operator*(__half, __half) = delete;
__half operator/(__half, __half) = delete;
