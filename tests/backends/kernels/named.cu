// The last warp works alone while the other warps meet at a barrier of their own, as fused emissions do.

__device__ __forceinline__ void sync_data(int threads) {
#ifdef MHC_HOST
  mhc_host_bar_sync(1, threads);
#else
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
#endif
}

extern "C" __global__ void split_roles(const float* __restrict__ x, float* __restrict__ out, int data_threads) {
  __shared__ float values[1024];
  __shared__ float factor;
  const int t = threadIdx.x;
  float mine = 0.0f;
  if (t < data_threads) {
    values[t] = x[blockIdx.x * data_threads + t];
    sync_data(data_threads);  // across-warps
    mine = values[data_threads - 1 - t];
    sync_data(data_threads);  // across-warps
    values[t] = __fmul_rn(mine, 2.0f);
  } else if (t == data_threads) {
    factor = 0.5f;
  }
  __syncthreads();  // across-warps
  if (t < data_threads) out[blockIdx.x * data_threads + t] = __fmul_rn(factor, values[(t + 32) % data_threads]);
}
