// Clusters of four blocks that send values to each other and count what arrives; blocks of three warps. The comment
// behind a statement is what race mode says if it is missing.

__device__ __forceinline__ void cluster_sync() {
  mhc_host_cluster_arrive();
  mhc_host_cluster_wait();
}

// The first warp sends its sums, the second one the squares (as doubles); both return at once. The third one waits
// for both kinds from all blocks and adds them in the order of ranks.
extern "C" __global__ void moments(const float* __restrict__ x, float* __restrict__ out) {
  __shared__ unsigned long long sums_came, squares_came;
  __shared__ float sums[4];
  __shared__ double squares[4];
  const int t = threadIdx.x, lane = t % 32, rank = blockIdx.x % 4;
  if (t == 0) {
    mhc_host_arrivals_expect(&sums_came, 16);  // arrivals-no-start
    mhc_host_arrivals_expect(&squares_came, 32);  // arrivals-no-start
  }
  cluster_sync();  // arrivals-no-start arrivals-unordered
  if (t < 64) {
    double sum = 0.0;
    for (int i = lane; i < 96; i += 32) {
      const double v = x[blockIdx.x * 96 + i];
      sum += t < 32 ? v : v * v;
    }
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (t < 4) mhc_host_send(&sums[rank], (float)sum, &sums_came, lane);
    if (t >= 32 && lane < 4) mhc_host_send(&squares[rank], sum, &squares_came, lane);
    return;
  }
  mhc_host_arrivals_wait(&squares_came);  // arrivals-in-flight
  double square = 0.0;
  for (int r = 0; r < 4; ++r) square += squares[r];
  mhc_host_arrivals_wait(&sums_came);  // arrivals-in-flight
  float sum = 0.0f;
  for (int r = 0; r < 4; ++r) sum = __fadd_rn(sum, sums[r]);
  out[blockIdx.x * 32 + lane] = lane % 2 == 0 ? sum : (float)square;
}

// Each thread sends one value; one thread waits, a barrier tells the others.
extern "C" __global__ void rotate(const float* __restrict__ x, float* __restrict__ out) {
  __shared__ unsigned long long came;
  __shared__ float row[96];
  const int t = threadIdx.x, at = blockIdx.x * 96 + t;
  if (t == 95) mhc_host_arrivals_expect(&came, 4 * 96);  // arrivals-no-start
  cluster_sync();  // arrivals-no-start arrivals-unordered
  mhc_host_send(&row[t], x[at], &came, (blockIdx.x + 1 + t / 32) % 4);
  if (t == 40) mhc_host_arrivals_wait(&came);  // arrivals-in-flight
  __syncthreads();  // arrivals-in-flight
  out[at] = row[95 - t];
}
