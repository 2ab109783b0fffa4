// Reductions of a row per block: by shuffles and static shared memory, and by a tree in dynamic shared memory.

__device__ __forceinline__ float warp_total(float v) {
  #pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}

extern "C" __global__ void __launch_bounds__(1024)
row_square_sum(const float* __restrict__ x, float* __restrict__ out, int columns) {
  __shared__ float partial[32];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const float4* row = reinterpret_cast<const float4*>(x + (size_t)blockIdx.x * columns);
  double sum = 0.0;
  for (int i = thread; i < columns / 4; i += blockDim.x) {
    const float4 v = row[i];
    sum = __fma_rn(v.x, v.x, sum);
    sum = __fma_rn(v.y, v.y, sum);
    sum = __fma_rn(v.z, v.z, sum);
    sum = __fma_rn(v.w, v.w, sum);
  }
  const float mine = warp_total(__double2float_rn(sum));
  if (lane == 0) partial[warp] = mine;
  __syncthreads();  // across-warps
  if (warp == 0) {
    const float total = warp_total(lane < (blockDim.x + 31) / 32 ? partial[lane] : 0.0f);
    if (lane == 0) out[blockIdx.x] = total;
  }
}

extern "C" __global__ void tree_sum(const float* __restrict__ x, float* __restrict__ out, int rounds) {
  extern __shared__ float tree[];
  const int thread = threadIdx.x;
  const float mine = x[blockIdx.x * blockDim.x + thread];
  float carry = 0.0f;
  for (int round = 0; round < rounds; ++round) {
    tree[thread] = __fadd_rn(mine, carry);
    __syncthreads();  // across-warps
    for (int half = blockDim.x / 2; half > 0; half >>= 1) {
      if (thread < half) tree[thread] = __fadd_rn(tree[thread], tree[thread + half]);
      __syncthreads();  // across-warps
    }
    carry = __fmul_rn(tree[0], 0.001f);
    __syncthreads();  // across-warps
  }
  if (thread == 0) out[blockIdx.x] = carry;
}
