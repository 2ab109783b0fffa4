// Normalising the rows and columns of a 4 x 4 matrix of positive numbers: in shared memory by one warp, in
// registers by shuffles, and as a part of a block that also averages its streams.
#include <cuda_bf16.h>

__device__ __forceinline__ float sum4(float a, float b, float c, float d) {
  return __fadd_rn(__fadd_rn(a, b), __fadd_rn(c, d));
}

extern "C" __global__ void balance_shared(const float* __restrict__ weights, float* __restrict__ out, int rounds) {
  __shared__ float m[16];
  __shared__ float scale[4];
  __shared__ float done[16];
  const int t = threadIdx.x;
  if (t < 32) {
    if (t < 16) m[t] = weights[blockIdx.x * 16 + t];
    __syncwarp();  // same-warp
    for (int round = 0; round < rounds; ++round) {
      if (t < 4) scale[t] = __frcp_rn(sum4(m[4 * t], m[4 * t + 1], m[4 * t + 2], m[4 * t + 3]));
      __syncwarp();  // same-warp
      if (t < 16) m[t] = __fmul_rn(m[t], scale[t / 4]);
      __syncwarp();  // same-warp
      if (t < 4) scale[t] = __frcp_rn(sum4(m[t], m[4 + t], m[8 + t], m[12 + t]));
      __syncwarp();  // same-warp
      if (t < 16) m[t] = __fmul_rn(m[t], scale[t % 4]);
      __syncwarp();  // same-warp
    }
    if (t < 16) done[15 - t] = m[t];
  }
  __syncthreads();  // across-warps
  if (t >= blockDim.x - 16) out[blockIdx.x * 16 + (t & 15)] = done[15 - (t & 15)];
}

// One matrix per half warp, one element per lane.
extern "C" __global__ void
balance_shuffle(const float* __restrict__ weights, float* __restrict__ out, int rounds, int matrices) {
  const int element = blockIdx.x * blockDim.x + threadIdx.x;
  float v = element < matrices * 16 ? weights[element] : 1.0f;
  for (int round = 0; round < rounds; ++round) {
    float s = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 1));
    s = __fadd_rn(s, __shfl_xor_sync(0xffffffffu, s, 2));
    v = __fdiv_rn(v, s);
    s = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 4));
    s = __fadd_rn(s, __shfl_xor_sync(0xffffffffu, s, 8));
    v = __fdiv_rn(v, s);
  }
  if (element < matrices * 16) out[element] = v;
}

// Scale of a token, then its matrix in warp 0, then the mixed streams by all threads.
extern "C" __global__ void __launch_bounds__(1024)
mix_streams(const __nv_bfloat16* __restrict__ x, const float* __restrict__ weights, __nv_bfloat16* __restrict__ y,
            float* __restrict__ scales, int columns, int rounds) {
  __shared__ float partial[32];
  __shared__ float m[16];
  __shared__ float norm[4];
  __shared__ float scale;
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const __nv_bfloat16* streams = x + (size_t)blockIdx.x * 4 * columns;
  float sum = 0.0f;
  for (int i = t; i < 4 * columns; i += blockDim.x) {
    const float v = __bfloat162float(streams[i]);
    sum = __fmaf_rn(v, v, sum);
  }
  for (int offset = 16; offset > 0; offset >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, offset));
  if (lane == 0) partial[warp] = sum;
  __syncthreads();  // across-warps
  if (warp == 0) {
    float all = lane < (blockDim.x + 31) / 32 ? partial[lane] : 0.0f;
    for (int offset = 16; offset > 0; offset >>= 1) all = __fadd_rn(all, __shfl_xor_sync(0xffffffffu, all, offset));
    if (lane == 0) {
      scale = __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(all, (float)(4 * columns)), 1e-6f)));
      scales[blockIdx.x] = scale;
    }
    __syncwarp();  // same-warp
    if (t < 16) m[t] = __fmul_rn(weights[blockIdx.x * 16 + t], scale);
    __syncwarp();  // same-warp
    for (int round = 0; round < rounds; ++round) {
      if (t < 4) norm[t] = sum4(m[4 * t], m[4 * t + 1], m[4 * t + 2], m[4 * t + 3]);
      __syncwarp();  // same-warp
      if (t < 16) m[t] = __fdiv_rn(m[t], norm[t / 4]);
      __syncwarp();  // same-warp
    }
  }
  __syncthreads();  // across-warps
  for (int c = t; c < columns; c += blockDim.x) {
    float v[4];
    #pragma unroll
    for (int s = 0; s < 4; ++s) v[s] = __bfloat162float(streams[s * columns + c]);
    #pragma unroll
    for (int s = 0; s < 4; ++s) {
      float o = __fmul_rn(m[4 * s], v[0]);
      #pragma unroll
      for (int k = 1; k < 4; ++k) o = __fmaf_rn(m[4 * s + k], v[k], o);
      y[((size_t)blockIdx.x * 4 + s) * columns + c] = __float2bfloat16_rn(o);
    }
  }
}
