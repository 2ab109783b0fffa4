// Barriers, warp-wide operations, atomics, cached loads: what goes through the runtime.
// __activemask and the shuffles without _sync are absent on purpose: no emission may depend on convergence.
#pragma once

// ---- block barriers ------------------------------------------------------------------------------------------
MHC_INLINE void __syncthreads(int line = __builtin_LINE()) { mhc_rt_sync_block(MHC_SYNCTHREADS, 0, line); }
MHC_INLINE int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
  return mhc_rt_sync_block(MHC_SYNC_COUNT, predicate != 0, line);
}
MHC_INLINE int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
  return mhc_rt_sync_block(MHC_SYNC_AND, predicate != 0, line);
}
MHC_INLINE int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
  return mhc_rt_sync_block(MHC_SYNC_OR, predicate != 0, line);
}

// ---- warp operations -----------------------------------------------------------------------------------------
MHC_INLINE void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  mhc_rt_sync_warp(MHC_SYNCWARP, mask, 0, 0, warpSize, line);
}
MHC_INLINE unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return static_cast<unsigned>(mhc_rt_sync_warp(MHC_BALLOT, mask, predicate != 0, 0, warpSize, line));
}
MHC_INLINE int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return static_cast<int>(mhc_rt_sync_warp(MHC_ANY, mask, predicate != 0, 0, warpSize, line));
}
MHC_INLINE int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return static_cast<int>(mhc_rt_sync_warp(MHC_ALL, mask, predicate != 0, 0, warpSize, line));
}

template <unsigned Size>
struct MhcBits;
template <>
struct MhcBits<2> {
  typedef unsigned short type;
};
template <>
struct MhcBits<4> {
  typedef unsigned type;
};
template <>
struct MhcBits<8> {
  typedef unsigned long long type;
};

template <class T>
MHC_INLINE T mhc_host_shuffle(unsigned op, unsigned mask, T value, unsigned argument, int width, int line) {
  typedef typename MhcBits<sizeof(T)>::type Bits;
  const unsigned long long sent = __builtin_bit_cast(Bits, value);
  return __builtin_bit_cast(T, static_cast<Bits>(mhc_rt_sync_warp(op, mask, sent, argument, width, line)));
}

// Overloads per type instead of one template, so that arguments convert as they do in CUDA.
#define MHC_SHUFFLES(T)                                                                                        \
  MHC_INLINE T __shfl_sync(unsigned mask, T v, int lane, int width = 32, int line = __builtin_LINE()) {         \
    return mhc_host_shuffle(MHC_SHFL_INDEX, mask, v, static_cast<unsigned>(lane), width, line);                 \
  }                                                                                                            \
  MHC_INLINE T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32, int line = __builtin_LINE()) {    \
    return mhc_host_shuffle(MHC_SHFL_XOR, mask, v, static_cast<unsigned>(lanes), width, line);                  \
  }                                                                                                            \
  MHC_INLINE T __shfl_up_sync(unsigned mask, T v, unsigned d, int width = 32, int line = __builtin_LINE()) {    \
    return mhc_host_shuffle(MHC_SHFL_UP, mask, v, d, width, line);                                              \
  }                                                                                                            \
  MHC_INLINE T __shfl_down_sync(unsigned mask, T v, unsigned d, int width = 32, int line = __builtin_LINE()) {  \
    return mhc_host_shuffle(MHC_SHFL_DOWN, mask, v, d, width, line);                                            \
  }
MHC_SHUFFLES(int)
MHC_SHUFFLES(unsigned)
MHC_SHUFFLES(long)
MHC_SHUFFLES(unsigned long)
MHC_SHUFFLES(long long)
MHC_SHUFFLES(unsigned long long)
MHC_SHUFFLES(float)
MHC_SHUFFLES(double)

// ---- atomics -------------------------------------------------------------------------------------------------
template <class T>
MHC_INLINE T mhc_host_atomic(T* address, unsigned op, unsigned type, T value, T compare = T()) {
  typedef typename MhcBits<sizeof(T)>::type Bits;
  return __builtin_bit_cast(
      T, static_cast<Bits>(mhc_rt_atomic(address, op, type, __builtin_bit_cast(Bits, value),
                                         __builtin_bit_cast(Bits, compare))));
}
#define MHC_ATOMIC(name, op, T, type) \
  MHC_INLINE T name(T* address, T value) { return mhc_host_atomic(address, op, type, value); }
MHC_ATOMIC(atomicAdd, MHC_ATOMIC_ADD, int, MHC_INT)
MHC_ATOMIC(atomicAdd, MHC_ATOMIC_ADD, unsigned, MHC_UINT)
MHC_ATOMIC(atomicAdd, MHC_ATOMIC_ADD, unsigned long long, MHC_ULL)
MHC_ATOMIC(atomicAdd, MHC_ATOMIC_ADD, float, MHC_FLOAT)
MHC_ATOMIC(atomicAdd, MHC_ATOMIC_ADD, double, MHC_DOUBLE)
MHC_ATOMIC(atomicMin, MHC_ATOMIC_MIN, int, MHC_INT)
MHC_ATOMIC(atomicMin, MHC_ATOMIC_MIN, unsigned, MHC_UINT)
MHC_ATOMIC(atomicMin, MHC_ATOMIC_MIN, unsigned long long, MHC_ULL)
MHC_ATOMIC(atomicMax, MHC_ATOMIC_MAX, int, MHC_INT)
MHC_ATOMIC(atomicMax, MHC_ATOMIC_MAX, unsigned, MHC_UINT)
MHC_ATOMIC(atomicMax, MHC_ATOMIC_MAX, unsigned long long, MHC_ULL)
MHC_ATOMIC(atomicExch, MHC_ATOMIC_EXCHANGE, int, MHC_INT)
MHC_ATOMIC(atomicExch, MHC_ATOMIC_EXCHANGE, unsigned, MHC_UINT)
MHC_ATOMIC(atomicExch, MHC_ATOMIC_EXCHANGE, unsigned long long, MHC_ULL)
MHC_ATOMIC(atomicExch, MHC_ATOMIC_EXCHANGE, float, MHC_FLOAT)
MHC_ATOMIC(atomicAnd, MHC_ATOMIC_AND, int, MHC_INT)
MHC_ATOMIC(atomicAnd, MHC_ATOMIC_AND, unsigned, MHC_UINT)
MHC_ATOMIC(atomicOr, MHC_ATOMIC_OR, int, MHC_INT)
MHC_ATOMIC(atomicOr, MHC_ATOMIC_OR, unsigned, MHC_UINT)
#undef MHC_ATOMIC
#define MHC_ATOMIC_CAS(T, type)                              \
  MHC_INLINE T atomicCAS(T* address, T compare, T value) {    \
    return mhc_host_atomic(address, MHC_ATOMIC_COMPARE, type, value, compare); \
  }
MHC_ATOMIC_CAS(int, MHC_INT)
MHC_ATOMIC_CAS(unsigned, MHC_UINT)
MHC_ATOMIC_CAS(unsigned long long, MHC_ULL)
#undef MHC_ATOMIC_CAS

// One CTA runs at a time on one OS thread: a fence has only the compiler to restrain. It orders nothing for the
// race checker, which knows barriers only.
MHC_INLINE void __threadfence() { __asm__ volatile("" ::: "memory"); }
MHC_INLINE void __threadfence_block() { __asm__ volatile("" ::: "memory"); }
MHC_INLINE void __threadfence_system() { __asm__ volatile("" ::: "memory"); }

// ---- loads and stores with cache hints -----------------------------------------------------------------------
#define MHC_LOAD(name)    \
  template <class T>       \
  MHC_INLINE T name(const T* address) { return *address; }
MHC_LOAD(__ldg)
MHC_LOAD(__ldca)
MHC_LOAD(__ldcg)
MHC_LOAD(__ldcs)
MHC_LOAD(__ldlu)
MHC_LOAD(__ldcv)
#undef MHC_LOAD
#define MHC_STORE(name)   \
  template <class T>       \
  MHC_INLINE void name(T* address, T value) { *address = value; }
MHC_STORE(__stwb)
MHC_STORE(__stcg)
MHC_STORE(__stcs)
MHC_STORE(__stwt)
#undef MHC_STORE

// Through the runtime, so that a race build sees the bytes.
MHC_INLINE void* memcpy(void* to, const void* from, size_t bytes) {
  mhc_rt_copy(to, from, bytes);
  return to;
}
MHC_INLINE void* memset(void* to, int value, size_t bytes) {
  mhc_rt_fill(to, value, bytes);
  return to;
}

// ---- time and traps ------------------------------------------------------------------------------------------
MHC_INLINE long long clock64() { return static_cast<long long>(mhc_rt_nanoseconds()); }
MHC_INLINE void __nanosleep(unsigned, int line = __builtin_LINE()) { mhc_rt_yield(line); }
MHC_INLINE void __trap(int line = __builtin_LINE()) { mhc_rt_trap(line); }
