// The host's stand-in for the part of NVIDIA's cuda_fp8.h that a quantised exit needs: float to e4m3 and back.
#pragma once

typedef unsigned char __nv_fp8_storage_t;
typedef unsigned short __nv_fp8x2_storage_t;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
// E5M2 is absent on purpose: naming it does not compile.
enum __nv_fp8_interpretation_t { __NV_E4M3 };

// Round to nearest, ties to even. e4m3 has no infinity: 0x7f is NaN and 0x7e is 448, the largest value. What
// rounds beyond 448 becomes 448 with __NV_SATFINITE and NaN without.
MHC_INLINE __nv_fp8_storage_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t saturate,
                                                    __nv_fp8_interpretation_t) {
  const unsigned bits = __float_as_uint(value);
  const unsigned sign = bits >> 24 & 0x80u;
  const unsigned magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  unsigned code;
  if (magnitude > 0x43e80000u) {  // 464, halfway from 448 to the step that does not exist; the tie goes to 448
    code = saturate == __NV_SATFINITE ? 0x7eu : 0x7fu;
  } else if (magnitude >= 0x3c800000u) {  // 2^-6, the smallest normal
    const unsigned rebased = magnitude - ((127u - 7u) << 23);
    code = (rebased + 0x7ffffu + (rebased >> 20 & 1u)) >> 20;
  } else {
    // Subnormal: adding 2^14 leaves the value in units of 2^-9 in the low mantissa bits, rounded by the FPU.
    code = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384.0f)) - 0x46800000u;
  }
  return static_cast<__nv_fp8_storage_t>(sign | code);
}
MHC_INLINE __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 v, __nv_saturation_t saturate,
                                                         __nv_fp8_interpretation_t kind) {
  return static_cast<__nv_fp8x2_storage_t>(__nv_cvt_float_to_fp8(v.y, saturate, kind) << 8 |
                                           __nv_cvt_float_to_fp8(v.x, saturate, kind));
}

struct __nv_fp8_e4m3 {
  __nv_fp8_storage_t __x;
  __nv_fp8_e4m3() = default;
  explicit __nv_fp8_e4m3(float value) : __x(__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3)) {}
  explicit operator float() const {
    const unsigned sign = static_cast<unsigned>(__x & 0x80u) << 24;
    const unsigned exponent = __x >> 3 & 0xfu;
    const unsigned mantissa = __x & 7u;
    if ((__x & 0x7fu) == 0x7fu) return __uint_as_float(0x7fffffffu);
    if (exponent != 0) return __uint_as_float(sign | (exponent + 127 - 7) << 23 | mantissa << 20);
    return __uint_as_float(sign | __float_as_uint(__fmul_rn(static_cast<float>(mantissa), 0.001953125f)));
  }
};
