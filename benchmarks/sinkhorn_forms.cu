// Cycles of one Sinkhorn iteration in several forms, one warp, n = 4. Throw-away measurement of form, not of product text.
#include <cstdio>
#include <cuda_runtime.h>
#define FULL 0xffffffffu
#define IT 200
__device__ __forceinline__ float rcpf(float x) { float r; asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float rcpz(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float refined(float a, float s) {
  const float r0 = rcpz(s), r = __fmaf_rn(r0, __fmaf_rn(-s, r0, 1.f), r0), q = __fmul_rn(a, r);
  return __fmaf_rn(__fmaf_rn(-s, q, a), r, q);
}
__device__ __forceinline__ float refined_r(float s) { const float r0 = rcpz(s); return __fmaf_rn(r0, __fmaf_rn(-s, r0, 1.f), r0); }
enum { PLAIN, FTZ, REFINED, DIV, RECIP };
template <int M> __device__ __forceinline__ float q(float a, float s) {
  if (M == PLAIN) return a * rcpf(s);
  if (M == FTZ) return a * rcpz(s);
  if (M == REFINED) return refined(a, s);
  if (M == RECIP) return __fmul_rn(a, refined_r(s));
  return __fdiv_rn(a, s);
}
template <int M> __global__ void element(float* o, long long* t) {
  float c = 0.1f + 0.01f * (threadIdx.x % 16);
  long long b = clock64();
  #pragma unroll 1
  for (int i = 0; i < IT; ++i) {
    float s = __fadd_rn(c, __shfl_xor_sync(FULL, c, 1)); s = __fadd_rn(s, __shfl_xor_sync(FULL, s, 2));
    c = q<M>(c, __fadd_rn(s, 1e-6f));
    s = __fadd_rn(c, __shfl_xor_sync(FULL, c, 4)); s = __fadd_rn(s, __shfl_xor_sync(FULL, s, 8));
    c = q<M>(c, __fadd_rn(s, 1e-6f));
  }
  if (threadIdx.x == 0) *t = clock64() - b;
  o[threadIdx.x] = c;
}
// three shuffles in parallel instead of two in sequence; same additions in the same order
template <int M> __global__ void element3(float* o, long long* t) {
  float c = 0.1f + 0.01f * (threadIdx.x % 16);
  const bool hi = threadIdx.x & 2, hj = threadIdx.x & 8;
  long long b = clock64();
  #pragma unroll 1
  for (int i = 0; i < IT; ++i) {
    float p = __shfl_xor_sync(FULL, c, 1), r0 = __shfl_xor_sync(FULL, c, 2), r1 = __shfl_xor_sync(FULL, c, 3);
    float s = __fadd_rn(__fadd_rn(c, p), __fadd_rn(r0, r1));
    c = q<M>(c, __fadd_rn(s, 1e-6f));
    p = __shfl_xor_sync(FULL, c, 4); r0 = __shfl_xor_sync(FULL, c, 8); r1 = __shfl_xor_sync(FULL, c, 12);
    s = __fadd_rn(__fadd_rn(c, p), __fadd_rn(r0, r1));
    c = q<M>(c, __fadd_rn(s, 1e-6f));
  }
  if (threadIdx.x == 0) *t = clock64() - b;
  o[threadIdx.x] = c + hi + hj;
}
template <int M> __global__ void regs(float* o, long long* t) {
  float c[16];
  for (int e = 0; e < 16; ++e) c[e] = 0.1f + 0.01f * ((threadIdx.x + e) % 16);
  long long b = clock64();
  #pragma unroll 1
  for (int i = 0; i < IT; ++i) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      float s = __fadd_rn(__fadd_rn(__fadd_rn(c[4*j], c[4*j+1]), __fadd_rn(c[4*j+2], c[4*j+3])), 1e-6f);
      #pragma unroll
      for (int k = 0; k < 4; ++k) c[4*j+k] = q<M>(c[4*j+k], s);
    }
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      float s = __fadd_rn(__fadd_rn(__fadd_rn(c[j], c[4+j]), __fadd_rn(c[8+j], c[12+j])), 1e-6f);
      #pragma unroll
      for (int k = 0; k < 4; ++k) c[4*k+j] = q<M>(c[4*k+j], s);
    }
  }
  if (threadIdx.x == 0) *t = clock64() - b;
  for (int e = 0; e < 16; ++e) o[threadIdx.x * 16 + e] = c[e];
}
// one row a lane, columns transposed by shuffles: row sum in the lane, 4x4 transpose (3 rounds of swaps), column sum in the lane
template <int M> __global__ void rows(float* o, long long* t) {
  float c[4];
  for (int e = 0; e < 4; ++e) c[e] = 0.1f + 0.01f * ((threadIdx.x * 4 + e) % 16);
  const int l = threadIdx.x & 3;
  long long b = clock64();
  #pragma unroll 1
  for (int i = 0; i < 2 * IT; ++i) {
    float s = __fadd_rn(__fadd_rn(__fadd_rn(c[0], c[1]), __fadd_rn(c[2], c[3])), 1e-6f);
    #pragma unroll
    for (int k = 0; k < 4; ++k) c[k] = q<M>(c[k], s);
    // transpose: round d exchanges with lane ^ d
    float x1 = __shfl_xor_sync(FULL, l & 1 ? c[0] : c[1], 1), x3 = __shfl_xor_sync(FULL, l & 1 ? c[2] : c[3], 1);
    if (l & 1) { c[0] = x1; c[2] = x3; } else { c[1] = x1; c[3] = x3; }
    float y0 = __shfl_xor_sync(FULL, l & 2 ? c[0] : c[2], 2), y1 = __shfl_xor_sync(FULL, l & 2 ? c[1] : c[3], 2);
    if (l & 2) { c[0] = y0; c[1] = y1; } else { c[2] = y0; c[3] = y1; }
  }
  if (threadIdx.x == 0) *t = clock64() - b;
  for (int e = 0; e < 4; ++e) o[threadIdx.x * 4 + e] = c[e];
}
// scaling form, everything in every lane: c = u K v
template <int M> __global__ void scaling_regs(float* o, long long* t) {
  float K[16], u[4] = {1, 1, 1, 1}, v[4] = {1, 1, 1, 1};
  for (int e = 0; e < 16; ++e) K[e] = 0.1f + 0.01f * ((threadIdx.x + e) % 16);
  long long b = clock64();
  #pragma unroll 1
  for (int i = 0; i < IT; ++i) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      float d = __fmul_rn(K[4*j], v[0]); d = __fmaf_rn(K[4*j+1], v[1], d); d = __fmaf_rn(K[4*j+2], v[2], d); d = __fmaf_rn(K[4*j+3], v[3], d);
      u[j] = q<M>(u[j], __fmaf_rn(u[j], d, 1e-6f));
    }
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      float d = __fmul_rn(K[j], u[0]); d = __fmaf_rn(K[4+j], u[1], d); d = __fmaf_rn(K[8+j], u[2], d); d = __fmaf_rn(K[12+j], u[3], d);
      v[j] = q<M>(v[j], __fmaf_rn(v[j], d, 1e-6f));
    }
  }
  if (threadIdx.x == 0) *t = clock64() - b;
  for (int e = 0; e < 4; ++e) o[threadIdx.x * 4 + e] = u[e] + v[e];
}
// scaling form, lane j holds row j and column j of K, u_j and v_j; others' factors by shuffles
template <int M> __global__ void scaling_lanes(float* o, long long* t) {
  float K[4], Kt[4], u = 1, v = 1;
  const int l = threadIdx.x & 3;
  for (int e = 0; e < 4; ++e) K[e] = 0.1f + 0.01f * (l * 4 + e), Kt[e] = 0.1f + 0.01f * (e * 4 + l);
  long long b = clock64();
  #pragma unroll 1
  for (int i = 0; i < IT; ++i) {
    float d = __fmul_rn(K[0], __shfl_sync(FULL, v, 0, 4)); d = __fmaf_rn(K[1], __shfl_sync(FULL, v, 1, 4), d);
    d = __fmaf_rn(K[2], __shfl_sync(FULL, v, 2, 4), d); d = __fmaf_rn(K[3], __shfl_sync(FULL, v, 3, 4), d);
    u = q<M>(u, __fmaf_rn(u, d, 1e-6f));
    d = __fmul_rn(Kt[0], __shfl_sync(FULL, u, 0, 4)); d = __fmaf_rn(Kt[1], __shfl_sync(FULL, u, 1, 4), d);
    d = __fmaf_rn(Kt[2], __shfl_sync(FULL, u, 2, 4), d); d = __fmaf_rn(Kt[3], __shfl_sync(FULL, u, 3, 4), d);
    v = q<M>(v, __fmaf_rn(v, d, 1e-6f));
  }
  if (threadIdx.x == 0) *t = clock64() - b;
  o[threadIdx.x] = u + v;
}
template <class F> void go(const char* name, F f) {
  float* o; long long *t, h; cudaMalloc(&o, 4096); cudaMalloc(&t, 8);
  for (int i = 0; i < 3; ++i) f<<<1, 32>>>(o, t);
  cudaMemcpy(&h, t, 8, cudaMemcpyDeviceToHost);
  printf("%-28s %7.1f cycles an iteration\n", name, (double)h / IT);
  cudaFree(o); cudaFree(t);
}
__global__ void mantissas(int* bad) {  // is the refined reciprocal the correctly rounded one, for every mantissa?
  for (unsigned m = blockIdx.x * blockDim.x + threadIdx.x; m < (1u << 23); m += gridDim.x * blockDim.x)
    for (int e = 0; e < 3; ++e) {
      const float s = __uint_as_float(m | (unsigned)(127 - 20 + 20 * e) << 23);
      if (__float_as_uint(refined_r(s)) != __float_as_uint(__frcp_rn(s))) atomicAdd(bad, 1);
    }
}
int main() {
  cudaDeviceProp p; cudaGetDeviceProperties(&p, 0); printf("%s, %d SMs\n", p.name, p.multiProcessorCount);
#define ALL(F) go(#F " rcp", F<PLAIN>); go(#F " rcp.ftz", F<FTZ>); go(#F " refined", F<REFINED>); go(#F " reciprocal rn", F<RECIP>); go(#F " div", F<DIV>);
  ALL(element) ALL(element3) ALL(regs) ALL(rows) ALL(scaling_regs) ALL(scaling_lanes)
  int *bad, h; cudaMalloc(&bad, 4); cudaMemset(bad, 0, 4); mantissas<<<512, 256>>>(bad); cudaMemcpy(&h, bad, 4, cudaMemcpyDeviceToHost);
  printf("refined reciprocal differs from correct rounding: %d of %d\n", h, 3 << 23);
}
