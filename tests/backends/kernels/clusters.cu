// Clusters of four blocks. The comment behind a barrier is what race mode says if it is missing or too weak.

__device__ __forceinline__ void cluster_arrive() {
#ifdef MHC_HOST
  mhc_host_cluster_arrive();
#else
  asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
#endif
}
__device__ __forceinline__ void cluster_arrive_relaxed() {
#ifdef MHC_HOST
  mhc_host_cluster_arrive_relaxed();
#else
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#ifdef MHC_HOST
  mhc_host_cluster_wait();
#else
  asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
#endif
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
template <class A>
__device__ __forceinline__ A* at_rank(A* mine, int rank) {
#ifdef MHC_HOST
  return static_cast<A*>(mhc_host_map_shared_rank(mine, rank));
#else
  A* theirs;
  asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(rank));
  return theirs;
#endif
}

// Every block sends its sum to all; each adds the four in the same order. One barrier before the sends, one after.
extern "C" __global__ void reduce_ranks(const float* __restrict__ x, float* __restrict__ out) {
  __shared__ float warp_sums[32];
  __shared__ float by_rank[4];
  const int t = threadIdx.x, rank = blockIdx.x % 4, warps = blockDim.x / 32;
  const float mine = x[blockIdx.x * blockDim.x + t];
  cluster_arrive_relaxed();  // nothing to publish yet
  float sum = mine;
  for (int d = 16; d > 0; d /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, d));
  if (t % 32 == 0) warp_sums[t / 32] = sum;
  __syncthreads();
  cluster_wait();  // start: remote-before-start
  if (t < 4) {
    float block_sum = 0.0f;
    for (int w = 0; w < warps; ++w) block_sum = __fadd_rn(block_sum, warp_sums[w]);
    at_rank(by_rank, t)[rank] = block_sum;
  }
  cluster_sync();  // race
  float total = by_rank[0];
  for (int r = 1; r < 4; ++r) total = __fadd_rn(total, by_rank[r]);
  out[blockIdx.x * blockDim.x + t] = __fmul_rn(mine, total);
}

// The last warp sends a factor to the next block, arrives and returns. The others wait for the factor, then read
// the tile of the next block; nobody may return before the last read.
extern "C" __global__ void pass_on(const float* __restrict__ x, float* __restrict__ out) {
  __shared__ float tile[1024];
  __shared__ float factor;
  const int t = threadIdx.x, rank = blockIdx.x % 4, data = blockDim.x - 32;
  cluster_sync();  // remote-before-start
  if (t >= data) {
    if (t == data) *at_rank(&factor, (rank + 1) % 4) = __fadd_rn(1.0f, (float)rank);
    cluster_arrive();  // race
    return;
  }
  const float mine = x[blockIdx.x * data + t];
  cluster_arrive();  // this warp has nothing to publish, and does some work before it waits
  const float square = __fmul_rn(mine, mine);
  cluster_wait();  // for the factor: race
  tile[t] = __fmul_rn(square, factor);
  cluster_sync();  // race
  out[blockIdx.x * data + t] = at_rank(tile, (rank + 1) % 4)[data - 1 - t];
  cluster_sync();  // remote-after-exit
}
