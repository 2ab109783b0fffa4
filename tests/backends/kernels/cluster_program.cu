// Interprets a random program of a cluster: one operation per thread and step. Block r owns the shared cell r, and the
// argument of an access to shared memory is r. Only the race checker's answer matters, one per cell.

extern "C" __global__ void run_program(const int* __restrict__ operations, const int* __restrict__ arguments,
                                       int* cells, int* sink, int steps, int first_barrier, int last_barrier) {
  __shared__ int cell0, cell1, cell2;
  const int t = threadIdx.x, thread = blockIdx.x * blockDim.x + t, threads = gridDim.x * blockDim.x;
  if (t == 0) cell0 = cell1 = cell2 = 0;
  __syncthreads();
  if (first_barrier) {
    mhc_host_cluster_arrive();
    mhc_host_cluster_wait();
  }
  int* const shared_cells[3] = {&cell0, &cell1, &cell2};
  int seen = 0;
  for (int step = 0; step < steps; ++step) {
    const int operation = operations[step * threads + thread], argument = arguments[step * threads + thread];
    switch (operation) {
      case 1: seen += *cells; break;
      case 2: *cells = t; break;
      case 3: __syncwarp((unsigned)argument); break;
      case 4: __syncthreads(); break;
      case 5: mhc_host_bar_sync(1 + argument % 16, argument / 16); break;
      case 6: seen += *static_cast<int*>(mhc_host_map_shared_rank(shared_cells[argument], argument)); break;
      case 7: *static_cast<int*>(mhc_host_map_shared_rank(shared_cells[argument], argument)) = t; break;
      // On one line: lanes of a warp may differ in whether they release, not in where they are.
      case 8: case 9: operation == 8 ? mhc_host_cluster_arrive() : mhc_host_cluster_arrive_relaxed(); break;
      case 10: mhc_host_cluster_wait(); break;
      default: break;
    }
  }
  if (last_barrier) {
    mhc_host_cluster_arrive();
    mhc_host_cluster_wait();
  }
  sink[thread] = seen;
}
