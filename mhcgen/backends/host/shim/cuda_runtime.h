// The host's stand-in for NVIDIA's cuda_runtime.h: as much of it as the launcher of `mhcgen emit --abi c` calls.
// Launches run at once on the calling thread; see launcher.cpp.
#pragma once

#include "prelude.h"

// Here they are fields of a configuration. Emissions have their sizes written out and use neither.
#undef gridDim
#undef blockDim

typedef struct CUstream_st* cudaStream_t;

// Numbers as in CUDA.
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorLaunchFailure = 719,
};

enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    struct {
      unsigned x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

enum cudaFuncAttribute { cudaFuncAttributeNonPortableClusterSizeAllowed = 13 };

// The executor takes clusters of every size that a GPU may be allowed to take.
MHC_INLINE cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
MHC_INLINE cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

// What stands for the address of a kernel: a function that takes its arguments by their addresses.
template <auto Kernel>
void mhc_host_entry(void** arguments) {
  mhc_host_call(Kernel, arguments);
}
#define MHC_KERNEL(kernel) reinterpret_cast<const void*>(&mhc_host_entry<kernel>)

// Returns a cudaError_t.
extern "C" int mhc_rt_launch(void (*entry)(void**), void** arguments, MhcDim3 grid, MhcDim3 block, MhcDim3 cluster);

MHC_INLINE cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  if (config->stream != nullptr) return cudaErrorInvalidResourceHandle;  // a CPU has none
  MhcDim3 cluster = {1, 1, 1};
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id != cudaLaunchAttributeClusterDimension) continue;
    cluster = {attribute.val.clusterDim.x, attribute.val.clusterDim.y, attribute.val.clusterDim.z};
  }
  const dim3 grid = config->gridDim, block = config->blockDim;
  return static_cast<cudaError_t>(mhc_rt_launch(reinterpret_cast<void (*)(void**)>(kernel), arguments,
                                                {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, cluster));
}
