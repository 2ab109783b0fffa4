// Memory for the example: of a GPU, or with -DMHC_EXAMPLE_HOST of this machine, for mhcgen's CPU executor.
// Where memory is lacking the example ends.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef MHC_EXAMPLE_HOST
#include <cuda_runtime_api.h>

static void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(error));
  exit(1);
}

static void *on_device(size_t bytes) {
  void *memory = NULL;
  if (bytes > 0) check(cudaMalloc(&memory, bytes));
  return memory;
}

static void *to_device(const void *from, size_t bytes) {
  void *memory = on_device(bytes);
  check(cudaMemcpy(memory, from, bytes, cudaMemcpyHostToDevice));
  return memory;
}

// Waits for the launches before it.
static void to_host(void *to, const void *from, size_t bytes) {
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}

#else

static void *on_device(size_t bytes) {
  void *memory = NULL;
  if (bytes > 0 && (memory = aligned_alloc(256, (bytes + 255) / 256 * 256)) == NULL) exit(1);
  return memory;
}

static void *to_device(const void *from, size_t bytes) { return memcpy(on_device(bytes), from, bytes); }
static void to_host(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }

#endif
