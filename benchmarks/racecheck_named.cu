// What racecheck says of a block barrier where one warp waits while the others pass a named barrier: docs/measurements.
//   nvcc -arch=sm_90 -DNAMED -o named benchmarks/racecheck_named.cu && compute-sanitizer --tool racecheck ./named
// Four warps exchange values behind barrier 1, write others, and a fifth warp reads those behind barrier 0, at which it
// has been from the start. Nothing in it races: every read is behind a barrier that its writer joined after the write.
// Without NAMED the four warps join no barrier of their own.
#include <cstdio>

__global__ void exchange(int* out) {
  __shared__ int first[128], second[128], third[128];
  const int t = threadIdx.x;
  if (t < 128) {
    for (const long long start = clock64(); clock64() - start < 100000;) {}  // the fifth warp is at its barrier by now
    first[t] = t;
#ifdef NAMED
    asm volatile("bar.sync 1, %0;" ::"r"(128) : "memory");
    second[t] = first[127 - t];
#else
    second[t] = 127 - t;
#endif
  }
  __syncthreads();
  int sum = 0;
  if (t >= 128) sum = second[t - 128] + second[t - 64];
  if (t < 128) third[t] = t;
  __syncthreads();
  if (t >= 128) out[t - 128] = sum + third[t - 128];
}

int main() {
  int *out, host[32], wrong = 0;
  cudaMalloc(&out, sizeof host);
  exchange<<<1, 160>>>(out);
  cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost);
  for (int i = 0; i < 32; ++i) wrong += host[i] != (127 - i) + (63 - i) + i;
  std::printf("%d wrong, %s\n", wrong, cudaGetErrorString(cudaGetLastError()));
  return wrong != 0;
}
