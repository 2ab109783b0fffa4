// What racecheck says of a named barrier that is followed by a block barrier: see docs/measurements.
//   nvcc -arch=sm_90 -DNAMED -o named benchmarks/racecheck_named.cu && compute-sanitizer --tool racecheck ./named
// Two warps exchange values behind barrier 1, write others, and a third warp reads those behind barrier 0. Nothing in it
// races: every read is behind a barrier that its writer joined after the write.
#include <cstdio>

__global__ void exchange(int* out) {
  __shared__ int first[64], second[64];
  const int t = threadIdx.x;
  if (t < 64) {
    first[t] = t;
#ifdef NAMED
    asm volatile("bar.sync 1, 64;" ::: "memory");
    second[t] = first[63 - t];
#else
    second[t] = 63 - t;
#endif
  }
  __syncthreads();
  if (t >= 64) out[t - 64] = second[t - 64] + second[t - 32];
}

int main() {
  int *out, host[32], wrong = 0;
  cudaMalloc(&out, sizeof host);
  exchange<<<1, 96>>>(out);
  cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost);
  for (int i = 0; i < 32; ++i) wrong += host[i] != (63 - i) + (31 - i);
  std::printf("%d wrong, %s\n", wrong, cudaGetErrorString(cudaGetLastError()));
  return wrong != 0;
}
