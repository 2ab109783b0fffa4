// CUDA for a host compiler: the part of the language that mhcgen's emissions may use.
//
// This file stands in front of the unmodified text of an emission. It includes no system header on purpose:
// whatever it does not define (an unknown intrinsic, libm's expf, inline PTX) must not compile, because the
// host could not give the bits that a GPU gives. Emitted text may ask `#ifdef MHC_HOST`.
#pragma once
#define MHC_HOST 1

#include "device_api.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
// Shared memory is thread_local: static storage at block scope, and `extern` is legal too. constinit promises
// that no initialiser runs, so the compiler emits no per-access check. Where it lies is up to module_map.h.
#define __shared__ constinit thread_local
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))

#define MHC_INLINE static inline __attribute__((always_inline, unused))

typedef decltype(sizeof(0)) size_t;
typedef decltype(static_cast<char*>(nullptr) - static_cast<char*>(nullptr)) ptrdiff_t;

#include "prelude_vectors.h"

// Indices. Functions of the running fiber, so that nothing here is a global that two CTAs would share.
MHC_INLINE uint3 mhc_host_index(MhcDim3 v) { return uint3{v.x, v.y, v.z}; }
MHC_INLINE dim3 mhc_host_shape(MhcDim3 v) { return dim3(v.x, v.y, v.z); }
#define threadIdx (mhc_host_index(mhc_rt_thread_index()))
#define blockIdx (mhc_host_index(mhc_rt_block_index()))
#define blockDim (mhc_host_shape(mhc_rt_block_shape()))
#define gridDim (mhc_host_shape(mhc_rt_grid_shape()))
constexpr int warpSize = 32;

#include "prelude_math.h"
#include "prelude_sync.h"

// The host halves of the PTX helpers that emissions define under `#ifdef MHC_HOST ... #else asm ... #endif`.
MHC_INLINE float mhc_host_rcp_approx(float x) { return __frcp_rn(x); }
MHC_INLINE float mhc_host_rsqrt_approx(float x) {
  return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x)));
}
MHC_INLINE float mhc_host_ex2_approx(float x) {
  const float r = mhc_rt_exp2(x);
  return r < 1.17549435e-38f ? 0.0f : r;  // ex2.approx.ftz gives no subnormals; NaN stays NaN
}
MHC_INLINE float mhc_host_lg2_approx(float x) {  // lg2.approx.ftz takes subnormals as zeros
  return __builtin_log2f(__builtin_fabsf(x) < 1.17549435e-38f ? 0.0f : x);
}
MHC_INLINE void mhc_host_bar_sync(int number, int threads, int line = __builtin_LINE()) {
  mhc_rt_sync_named(number, threads, line);
}
MHC_INLINE void mhc_host_cluster_arrive(int line = __builtin_LINE()) { mhc_rt_cluster_arrive(1, line); }
// Arrives and publishes nothing: barrier.cluster.arrive.relaxed.
MHC_INLINE void mhc_host_cluster_arrive_relaxed(int line = __builtin_LINE()) { mhc_rt_cluster_arrive(0, line); }
MHC_INLINE void mhc_host_cluster_wait(int line = __builtin_LINE()) { mhc_rt_cluster_wait(line); }
MHC_INLINE void* mhc_host_map_shared_rank(void* mine, int rank, int line = __builtin_LINE()) {
  return mhc_rt_map_shared(mine, rank, line);
}
// 16 bytes from global to shared memory; they are there once this thread has waited for its copies.
MHC_INLINE void mhc_host_copy_async(void* to_shared, const void* from_global, int line = __builtin_LINE()) {
  mhc_rt_copy_async(to_shared, from_global, line);
}
MHC_INLINE void mhc_host_copies_wait() { mhc_rt_copies_wait(); }
// One thread of a block says how many bytes will arrive there; a counter serves once in a launch.
MHC_INLINE void mhc_host_arrivals_expect(unsigned long long* counter, int bytes, int line = __builtin_LINE()) {
  mhc_rt_arrivals_expect(counter, bytes, line);
}
// To the same place in the block of this rank, where the same counter counts the bytes.
MHC_INLINE void mhc_host_send(float* to, float value, unsigned long long* counter, int rank,
                              int line = __builtin_LINE()) {
  mhc_rt_send(to, __builtin_bit_cast(unsigned, value), sizeof value, counter, rank, line);
}
MHC_INLINE void mhc_host_send(double* to, double value, unsigned long long* counter, int rank,
                              int line = __builtin_LINE()) {
  mhc_rt_send(to, __builtin_bit_cast(unsigned long long, value), sizeof value, counter, rank, line);
}
MHC_INLINE void mhc_host_arrivals_wait(unsigned long long* counter, int line = __builtin_LINE()) {
  mhc_rt_arrivals_wait(counter, line);
}
MHC_INLINE unsigned long long mhc_host_globaltimer() { return mhc_rt_nanoseconds(); }

// One exported entry per kernel: unpacks void** by the kernel's own parameter types. The static_assert turns a
// signature that the Python side has wrong into a compile error instead of a launch with garbage.
template <class A, class B>
inline constexpr bool mhc_host_same = false;
template <class A>
inline constexpr bool mhc_host_same<A, A> = true;

template <unsigned... I>
struct MhcSequence {};
template <unsigned N, unsigned... I>
struct MhcCount : MhcCount<N - 1, N - 1, I...> {};
template <unsigned... I>
struct MhcCount<0, I...> {
  typedef MhcSequence<I...> type;
};

template <class... A, unsigned... I>
MHC_INLINE void mhc_host_call(void (*kernel)(A...), [[maybe_unused]] void** arguments, MhcSequence<I...>) {
  kernel(*static_cast<A*>(arguments[I])...);
}
template <class... A>
MHC_INLINE void mhc_host_call(void (*kernel)(A...), void** arguments) {
  mhc_host_call(kernel, arguments, typename MhcCount<sizeof...(A)>::type());
}

#define MHC_HOST_ENTRY(kernel, signature)                                                           \
  static_assert(mhc_host_same<decltype(kernel), signature>,                                        \
                "the declared signature of kernel " #kernel " differs from its definition");       \
  extern "C" __attribute__((no_sanitize("thread"))) void mhc_entry_##kernel(void** arguments) {    \
    mhc_host_call(&kernel, arguments);                                                             \
  }
