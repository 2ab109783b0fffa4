// Asynchronous copies to shared memory. The comment behind a statement is the scope of the race if it is missing.

// Two halves of a buffer: while one is used, the next rows are on their way to the other.
extern "C" __global__ void reverse_rows(const float* __restrict__ x, float* __restrict__ out, int rounds) {
  __shared__ __align__(16) float tile[2][256];
  const int t = threadIdx.x;
  const float* from = x + blockIdx.x * rounds * 256;
  mhc_host_copy_async(&tile[0][4 * t], from + 4 * t);
  for (int r = 0; r < rounds; ++r) {
    mhc_host_copies_wait();  // same-warp
    __syncthreads();  // across-warps
    if (r + 1 < rounds) mhc_host_copy_async(&tile[(r + 1) % 2][4 * t], from + (r + 1) * 256 + 4 * t);
    for (int i = t; i < 256; i += 64) out[(blockIdx.x * rounds + r) * 256 + i] = tile[r % 2][255 - i];
  }
}
