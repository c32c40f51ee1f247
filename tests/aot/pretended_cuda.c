// A libcuda.so.1 for a Hopper GPU that is not there: what is launched on it is written down and does not run.
//
// It has what Triton's own C calls, so that a test can compare, byte for byte, what two ways to a launch hand
// to the driver. Compile with the cuda.h that Triton brings. Not for several threads at once.

#include <cuda.h>
#include <string.h>

#define MOST_FUNCTIONS 16
#define MOST_ARGUMENTS 128

// ---- what the test reads and sets

static struct {
  CUfunction function;
  int arguments, bytes[MOST_ARGUMENTS];
} described[MOST_FUNCTIONS];
static unsigned char written[1 << 20];
static size_t length;
static int encoded;

// Tell of how many bytes each argument of a function is. Without, only its grid and the like are written down.
void pretended_describe(CUfunction function, int arguments, const int *bytes) {
  for (int i = 0; i < MOST_FUNCTIONS; i++)
    if (!described[i].function || described[i].function == function) {
      described[i].function = function;
      described[i].arguments = arguments;
      memcpy(described[i].bytes, bytes, arguments * sizeof(int));
      return;
    }
}

// Copy what was written down since the last call, and return how many bytes that is.
size_t pretended_take(unsigned char *to) {
  size_t taken = length;
  memcpy(to, written, taken);
  length = 0;
  return taken;
}

// Return how many TMA descriptors were encoded so far.
int pretended_encoded(void) { return encoded; }

static void write_down(const void *from, size_t bytes) {
  if (length + bytes <= sizeof written) {
    memcpy(written + length, from, bytes);
    length += bytes;
  }
}

// ---- launches

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  unsigned sizes[] = {config->gridDimX,  config->gridDimY,  config->gridDimZ,       config->blockDimX,
                      config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->numAttrs};
  write_down(sizes, sizeof sizes);
  write_down(&config->hStream, sizeof config->hStream);
  write_down(&function, sizeof function);
  for (unsigned i = 0; i < config->numAttrs; i++) {
    write_down(&config->attrs[i].id, sizeof config->attrs[i].id);
    write_down(&config->attrs[i].value, sizeof(unsigned)); // the rest of the union is set for some attributes only
  }
  for (int i = 0; i < MOST_FUNCTIONS; i++)
    if (described[i].function == function)
      for (int k = 0; k < described[i].arguments; k++)
        write_down(arguments[k], described[i].bytes[k]);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                        const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                        const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                        CUtensorMapFloatOOBfill fill) {
  if (rank != 2)
    return CUDA_ERROR_INVALID_VALUE;
  cuuint64_t numbers[] = {type,   (cuuint64_t)address, sizes[0],   sizes[1], strides[0],
                          box[0], box[1],              interleave, swizzle,  promotion,
                          fill,   steps[0],            steps[1]};
  memset(map, 0, sizeof *map);
  memcpy(map, numbers, sizeof numbers);
  encoded++;
  return CUDA_SUCCESS;
}

// ---- a device, its context and its modules

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 232448; // bytes of shared memory, and nothing that anybody asks for
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleLoadData(CUmodule *module, const void *image) {
  static size_t modules;
  *module = (CUmodule)++modules;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuPointerGetAttribute(void *to, CUpointer_attribute attribute, CUdeviceptr pointer) {
  memcpy(to, &pointer, sizeof pointer); // the device's address of memory is the host's
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
  *text = "an error of the pretended driver";
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult CUDAAPI cuDeviceGet(CUdevice *device, int number) { return *device = number, CUDA_SUCCESS; }
CUresult CUDAAPI cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult CUDAAPI cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  return *context = (CUcontext)1, CUDA_SUCCESS;
}
CUresult CUDAAPI cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return CUDA_SUCCESS;
}
CUresult CUDAAPI cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
