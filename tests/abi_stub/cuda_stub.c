// The driver that only takes notes: tests set `stub_device` and `stub_capability` and read `stub_notes`.
#include "cuda.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int stub_device = 0;  // -1: no context
int stub_capability = 90;
char stub_notes[8192];

static void note(const char *format, ...) {
  const size_t at = strlen(stub_notes);
  va_list values;
  va_start(values, format);
  vsnprintf(stub_notes + at, sizeof stub_notes - at, format, values);
  va_end(values);
}

static char names[16][256];
static int name_count;

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = stub_device;
  return stub_device < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  (void)device;
  const int major = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
  *value = major ? stub_capability / 10 : stub_capability % 10;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  if (memcmp(image, "\177ELF", 4) != 0) return CUDA_ERROR_INVALID_IMAGE;
  note("load %.8s;", (const char *)image + 5);  // test images say there what they are
  *module = (CUmodule)names;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
  (void)module;
  note("unload;");
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  (void)module;
  snprintf(names[name_count % 16], sizeof names[0], "%s", name);
  *function = (CUfunction)names[name_count++ % 16];
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  note("allow %s %d=%d;", (const char *)function, (int)attribute, value);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  (void)arguments;
  (void)extra;
  note("launch %s grid %u,%u,%u block %u,%u,%u", (const char *)function, config->gridDimX, config->gridDimY,
       config->gridDimZ, config->blockDimX, config->blockDimY, config->blockDimZ);
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute *attribute = &config->attrs[i];
    if (attribute->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      note(" cluster %u,%u,%u", attribute->value.clusterDim.x, attribute->value.clusterDim.y,
           attribute->value.clusterDim.z);
    } else {
      note(" dependent %d", attribute->value.programmaticStreamSerializationAllowed);
    }
  }
  note(";");
  return CUDA_SUCCESS;
}
