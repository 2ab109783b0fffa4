// Arithmetic of the emission: only operations whose bits are the same on a GPU and on an IEEE CPU.
//
// Every result passes through MHC_OPAQUE, an empty asm statement: a compiler can then not fuse a product with a
// following sum, whatever its contraction mode. (The flag -ffp-contract=off covers plain operators.)
#pragma once

#if defined(__x86_64__)
#define MHC_OPAQUE(value) __asm__("" : "+x"(value))
#elif defined(__aarch64__)
#define MHC_OPAQUE(value) __asm__("" : "+w"(value))
#else
#define MHC_OPAQUE(value) __asm__("" : "+m"(value))
#endif

#define MHC_OPERATION(name, T, parameters, expression) \
  MHC_INLINE T name parameters {                        \
    T result = expression;                              \
    MHC_OPAQUE(result);                                 \
    return result;                                      \
  }
MHC_OPERATION(__fadd_rn, float, (float a, float b), a + b)
MHC_OPERATION(__fsub_rn, float, (float a, float b), a - b)
MHC_OPERATION(__fmul_rn, float, (float a, float b), a * b)
MHC_OPERATION(__fdiv_rn, float, (float a, float b), a / b)
MHC_OPERATION(__frcp_rn, float, (float a), 1.0f / a)
MHC_OPERATION(__fsqrt_rn, float, (float a), __builtin_sqrtf(a))
MHC_OPERATION(__fmaf_rn, float, (float a, float b, float c), __builtin_fmaf(a, b, c))
MHC_OPERATION(__dadd_rn, double, (double a, double b), a + b)
MHC_OPERATION(__dsub_rn, double, (double a, double b), a - b)
MHC_OPERATION(__dmul_rn, double, (double a, double b), a * b)
MHC_OPERATION(__ddiv_rn, double, (double a, double b), a / b)
MHC_OPERATION(__drcp_rn, double, (double a), 1.0 / a)
MHC_OPERATION(__dsqrt_rn, double, (double a), __builtin_sqrt(a))
MHC_OPERATION(__fma_rn, double, (double a, double b, double c), __builtin_fma(a, b, c))
MHC_OPERATION(sqrtf, float, (float a), __builtin_sqrtf(a))
MHC_OPERATION(sqrt, double, (double a), __builtin_sqrt(a))
MHC_OPERATION(fmaf, float, (float a, float b, float c), __builtin_fmaf(a, b, c))
MHC_OPERATION(fma, double, (double a, double b, double c), __builtin_fma(a, b, c))
#undef MHC_OPERATION

// ---- bits ----------------------------------------------------------------------------------------------------
MHC_INLINE unsigned __float_as_uint(float v) { return __builtin_bit_cast(unsigned, v); }
MHC_INLINE int __float_as_int(float v) { return __builtin_bit_cast(int, v); }
MHC_INLINE float __uint_as_float(unsigned v) { return __builtin_bit_cast(float, v); }
MHC_INLINE float __int_as_float(int v) { return __builtin_bit_cast(float, v); }
MHC_INLINE long long __double_as_longlong(double v) { return __builtin_bit_cast(long long, v); }
MHC_INLINE double __longlong_as_double(long long v) { return __builtin_bit_cast(double, v); }
MHC_INLINE int __double2hiint(double v) { return static_cast<int>(__double_as_longlong(v) >> 32); }
MHC_INLINE int __double2loint(double v) { return static_cast<int>(__double_as_longlong(v)); }
MHC_INLINE double __hiloint2double(int high, int low) {
  const unsigned long long bits =
      static_cast<unsigned long long>(static_cast<unsigned>(high)) << 32 | static_cast<unsigned>(low);
  return __longlong_as_double(static_cast<long long>(bits));
}
MHC_INLINE int __popc(unsigned v) { return __builtin_popcount(v); }
MHC_INLINE int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
MHC_INLINE int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
MHC_INLINE int __clzll(long long v) { return v == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(v)); }
MHC_INLINE int __ffs(int v) { return __builtin_ffs(v); }
MHC_INLINE int __ffsll(long long v) { return __builtin_ffsll(v); }
MHC_INLINE unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
MHC_INLINE unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 0xf;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (pick & 7))) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;  // the top bit replicates the sign of the byte
    result |= byte << (8 * i);
  }
  return result;
}

// ---- minimum, maximum, sign, rounding ------------------------------------------------------------------------
// PTX min/max: the operand that is a number wins over NaN, two NaNs give the canonical one, and -0 < +0.
MHC_INLINE float fminf(float a, float b) {
  if (a < b) return a;
  if (b < a) return b;
  if (a == b) return __uint_as_float(__float_as_uint(a) | __float_as_uint(b));
  return a == a ? a : b == b ? b : __uint_as_float(0x7fffffffu);
}
MHC_INLINE float fmaxf(float a, float b) {
  if (a > b) return a;
  if (b > a) return b;
  if (a == b) return __uint_as_float(__float_as_uint(a) & __float_as_uint(b));
  return a == a ? a : b == b ? b : __uint_as_float(0x7fffffffu);
}
MHC_INLINE double fmin(double a, double b) {
  if (a < b) return a;
  if (b < a) return b;
  if (a == b) return __longlong_as_double(__double_as_longlong(a) | __double_as_longlong(b));
  return a == a ? a : b == b ? b : __longlong_as_double(0x7fffffffffffffffll);
}
MHC_INLINE double fmax(double a, double b) {
  if (a > b) return a;
  if (b > a) return b;
  if (a == b) return __longlong_as_double(__double_as_longlong(a) & __double_as_longlong(b));
  return a == a ? a : b == b ? b : __longlong_as_double(0x7fffffffffffffffll);
}
// The result types of CUDA's mixed overloads: unsigned wins over signed, double over float.
#define MHC_MINMAX(R, A, B)                            \
  MHC_INLINE R min(A a, B b) {                          \
    const R x = static_cast<R>(a), y = static_cast<R>(b); \
    return x < y ? x : y;                               \
  }                                                     \
  MHC_INLINE R max(A a, B b) {                          \
    const R x = static_cast<R>(a), y = static_cast<R>(b); \
    return x > y ? x : y;                               \
  }
MHC_MINMAX(int, int, int)
MHC_MINMAX(unsigned, unsigned, unsigned)
MHC_MINMAX(unsigned, int, unsigned)
MHC_MINMAX(unsigned, unsigned, int)
MHC_MINMAX(long, long, long)
MHC_MINMAX(unsigned long, unsigned long, unsigned long)
MHC_MINMAX(unsigned long, long, unsigned long)
MHC_MINMAX(unsigned long, unsigned long, long)
MHC_MINMAX(long long, long long, long long)
MHC_MINMAX(unsigned long long, unsigned long long, unsigned long long)
MHC_MINMAX(unsigned long long, long long, unsigned long long)
MHC_MINMAX(unsigned long long, unsigned long long, long long)
#undef MHC_MINMAX
MHC_INLINE float min(float a, float b) { return fminf(a, b); }
MHC_INLINE float max(float a, float b) { return fmaxf(a, b); }
MHC_INLINE double min(double a, double b) { return fmin(a, b); }
MHC_INLINE double max(double a, double b) { return fmax(a, b); }
MHC_INLINE double min(float a, double b) { return fmin(a, b); }
MHC_INLINE double max(float a, double b) { return fmax(a, b); }
MHC_INLINE double min(double a, float b) { return fmin(a, b); }
MHC_INLINE double max(double a, float b) { return fmax(a, b); }

MHC_INLINE float fabsf(float v) { return __builtin_fabsf(v); }
MHC_INLINE double fabs(double v) { return __builtin_fabs(v); }
MHC_INLINE int abs(int v) { return v < 0 ? -v : v; }
MHC_INLINE float copysignf(float a, float b) { return __builtin_copysignf(a, b); }
MHC_INLINE double copysign(double a, double b) { return __builtin_copysign(a, b); }
MHC_INLINE float rintf(float v) { return __builtin_rintf(v); }
MHC_INLINE float nearbyintf(float v) { return __builtin_rintf(v); }
MHC_INLINE float floorf(float v) { return __builtin_floorf(v); }
MHC_INLINE float ceilf(float v) { return __builtin_ceilf(v); }
MHC_INLINE float truncf(float v) { return __builtin_truncf(v); }
MHC_INLINE double rint(double v) { return __builtin_rint(v); }
MHC_INLINE double floor(double v) { return __builtin_floor(v); }
MHC_INLINE double ceil(double v) { return __builtin_ceil(v); }
MHC_INLINE double trunc(double v) { return __builtin_trunc(v); }
MHC_INLINE bool isnan(float v) { return v != v; }
MHC_INLINE bool isnan(double v) { return v != v; }
MHC_INLINE bool isinf(float v) { return __builtin_isinf(v); }
MHC_INLINE bool isinf(double v) { return __builtin_isinf(v); }
MHC_INLINE bool isfinite(float v) { return __builtin_isfinite(v); }
MHC_INLINE bool isfinite(double v) { return __builtin_isfinite(v); }

// ---- conversions ---------------------------------------------------------------------------------------------
// PTX cvt saturates. NaN becomes 0, except from double or to a 64-bit integer, where only the top bit is set.
template <class I, class F>
MHC_INLINE I mhc_host_saturate(F rounded) {
  constexpr bool is_signed = static_cast<I>(-1) < static_cast<I>(0);
  constexpr int bits = 8 * sizeof(I);
  constexpr I top = static_cast<I>(1ull << (bits - 1));
  constexpr I lowest = is_signed ? top : 0;
  constexpr I highest = static_cast<I>(~lowest);
  const F limit = static_cast<F>(1ull << (bits - 1)) * (is_signed ? 1 : 2);
  if (rounded != rounded) return sizeof(F) == 8 || bits == 64 ? top : 0;
  if (rounded >= limit) return highest;
  if (is_signed ? rounded <= -limit : rounded <= 0) return lowest;
  return static_cast<I>(rounded);
}
#define MHC_CONVERSIONS(F, from, suffix)                                                                         \
  MHC_INLINE int __##from##2int_rn(F v) { return mhc_host_saturate<int>(__builtin_rint##suffix(v)); }            \
  MHC_INLINE int __##from##2int_rz(F v) { return mhc_host_saturate<int>(__builtin_trunc##suffix(v)); }           \
  MHC_INLINE int __##from##2int_rd(F v) { return mhc_host_saturate<int>(__builtin_floor##suffix(v)); }           \
  MHC_INLINE int __##from##2int_ru(F v) { return mhc_host_saturate<int>(__builtin_ceil##suffix(v)); }            \
  MHC_INLINE unsigned __##from##2uint_rn(F v) { return mhc_host_saturate<unsigned>(__builtin_rint##suffix(v)); } \
  MHC_INLINE unsigned __##from##2uint_rz(F v) { return mhc_host_saturate<unsigned>(__builtin_trunc##suffix(v)); } \
  MHC_INLINE long long __##from##2ll_rn(F v) { return mhc_host_saturate<long long>(__builtin_rint##suffix(v)); } \
  MHC_INLINE long long __##from##2ll_rz(F v) { return mhc_host_saturate<long long>(__builtin_trunc##suffix(v)); }
MHC_CONVERSIONS(float, float, f)
MHC_CONVERSIONS(double, double, )
#undef MHC_CONVERSIONS
MHC_INLINE float __int2float_rn(int v) { return static_cast<float>(v); }
MHC_INLINE float __uint2float_rn(unsigned v) { return static_cast<float>(v); }
MHC_INLINE float __ll2float_rn(long long v) { return static_cast<float>(v); }
MHC_INLINE float __ull2float_rn(unsigned long long v) { return static_cast<float>(v); }
MHC_INLINE double __int2double_rn(int v) { return v; }
MHC_INLINE double __uint2double_rn(unsigned v) { return v; }
MHC_INLINE double __ll2double_rn(long long v) { return static_cast<double>(v); }
MHC_INLINE double __ull2double_rn(unsigned long long v) { return static_cast<double>(v); }
MHC_INLINE float __double2float_rn(double v) { return static_cast<float>(v); }
