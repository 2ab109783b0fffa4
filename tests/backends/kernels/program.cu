// Interprets a random program: one operation per thread and step. Only the race checker's answer matters.

extern "C" __global__ void run_program(const int* __restrict__ operations, const int* __restrict__ arguments,
                                       int* cells, int* sink, int steps) {
  __shared__ int shared_cells[4];
  const int t = threadIdx.x;
  if (t < 4) shared_cells[t] = 0;
  __syncthreads();
  int seen = 0;
  for (int step = 0; step < steps; ++step) {
    const int argument = arguments[step * blockDim.x + t];
    switch (operations[step * blockDim.x + t]) {
      case 1: seen += cells[argument]; break;
      case 2: cells[argument] = t; break;
      case 3: __syncwarp((unsigned)argument); break;
      case 4: __syncthreads(); break;
      case 5: mhc_host_bar_sync(1 + argument % 16, argument / 16); break;
      case 6: seen += shared_cells[argument]; break;
      case 7: shared_cells[argument] = t; break;
      case 8: atomicAdd(cells + argument, 1); break;
      default: break;
    }
  }
  sink[t] = seen;
}
