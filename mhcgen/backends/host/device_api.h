// The calls that the emission (through prelude.h) makes into the runtime.
// Both sides include this file; it needs no system header, because the emission must see none.
#pragma once

struct MhcDim3 {
  unsigned x, y, z;
};

// What a warp-wide operation does besides waiting for its lanes.
enum MhcWarpOp : unsigned {
  MHC_SYNCWARP,
  MHC_SHFL_INDEX,
  MHC_SHFL_XOR,
  MHC_SHFL_UP,
  MHC_SHFL_DOWN,
  MHC_BALLOT,
  MHC_ANY,
  MHC_ALL,
};

// What a block barrier returns to its threads.
enum MhcBlockOp : unsigned { MHC_SYNCTHREADS, MHC_SYNC_COUNT, MHC_SYNC_AND, MHC_SYNC_OR };

enum MhcAtomicOp : unsigned {
  MHC_ATOMIC_ADD,
  MHC_ATOMIC_MIN,
  MHC_ATOMIC_MAX,
  MHC_ATOMIC_EXCHANGE,
  MHC_ATOMIC_COMPARE,
  MHC_ATOMIC_AND,
  MHC_ATOMIC_OR,
};

enum MhcAtomicType : unsigned { MHC_INT, MHC_UINT, MHC_ULL, MHC_FLOAT, MHC_DOUBLE };

extern "C" {
// Constant within one fiber, hence `const`: the compiler may keep the answer in a register.
MhcDim3 mhc_rt_thread_index(void) __attribute__((const));
MhcDim3 mhc_rt_block_index(void) __attribute__((const));
MhcDim3 mhc_rt_block_shape(void) __attribute__((const));
MhcDim3 mhc_rt_grid_shape(void) __attribute__((const));

// `line` is the source line of the call: threads that meet must come from the same one.
int mhc_rt_sync_block(unsigned op, int predicate, int line);
// `value` travels as raw bits; `argument` is the source lane, the xor mask or the delta.
unsigned long long mhc_rt_sync_warp(unsigned op, unsigned mask, unsigned long long value, unsigned argument,
                                    int width, int line);
// Returns the old value; the caller passes values as raw bits.
unsigned long long mhc_rt_atomic(void* address, unsigned op, unsigned type, unsigned long long value,
                                 unsigned long long compare);
// bar.sync `number`, `threads`.
void mhc_rt_sync_named(int number, int threads, int line);
// The halves of barrier.cluster; `release`: what the thread did before is visible to all that wait.
void mhc_rt_cluster_arrive(int release, int line);
void mhc_rt_cluster_wait(int line);
// Where the shared memory at `mine` lies in the block of this rank.
void* mhc_rt_map_shared(void* mine, int rank, int line);
// cp.async of 16 bytes to shared memory, and cp.async.wait_all: only then does the memory change.
void mhc_rt_copy_async(void* to, const void* from, int line);
void mhc_rt_copies_wait(void);
// What arrives at a counter in shared memory (an mbarrier, st.async): the bytes a block expects; `bytes` of `value`
// for the block of this rank, whose memory changes with the last byte it expects; the wait for that.
void mhc_rt_arrivals_expect(unsigned long long* counter, int bytes, int line);
void mhc_rt_send(void* to, unsigned long long value, unsigned bytes, unsigned long long* counter, int rank, int line);
void mhc_rt_arrivals_wait(unsigned long long* counter, int line);
void mhc_rt_copy(void* to, const void* from, unsigned long bytes);
void mhc_rt_fill(void* to, int value, unsigned long bytes);
void mhc_rt_yield(int line);
void mhc_rt_trap(int line) __attribute__((noreturn));

float mhc_rt_exp2(float x);
unsigned long long mhc_rt_nanoseconds(void);
}
