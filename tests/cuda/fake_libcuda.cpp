// A libcuda.so whose GPU is the host: work is done when it is queued. Built against the real cuda.h, which checks every
// signature here. It counts the calls that would spoil another thread's capture, and can take its time in all of them.

#include <cuda.h>
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace {

std::mutex lock;
std::map<CUstream, int> priorities;  // of the streams that there are
std::map<CUevent, bool> events;      // whether a query says that it is past
std::map<CUevent, bool> timed;
struct Allocation {
  size_t bytes;
  unsigned long long number;
};
std::map<void*, Allocation> memory;
constexpr size_t kNotExportable = 13;  // bytes of an allocation that this GPU does not export
unsigned long long allocations = 1ull << 40;
std::atomic<int> unsafe{0}, slow_ms{0}, fails{0}, busy{0}, by_rows{0};
std::atomic<uintptr_t> handles{1}, loaded{0};
thread_local int contexts = 0;
thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUresult called() {
  if (!contexts) return CUDA_ERROR_INVALID_CONTEXT;
  if (mode != CU_STREAM_CAPTURE_MODE_RELAXED) ++unsafe;
  if (slow_ms) std::this_thread::sleep_for(std::chrono::milliseconds(slow_ms));
  return CUresult(fails.exchange(0));
}

CUresult take(void** out, size_t bytes) {
  if (CUresult st = called()) return st;
  std::lock_guard<std::mutex> l(lock);
  memory[*out = std::malloc(bytes)] = {bytes, ++allocations};
  return CUDA_SUCCESS;
}

CUresult give(void* p) {
  if (CUresult st = called()) return st;
  std::lock_guard<std::mutex> l(lock);
  if (!memory.erase(p)) return CUDA_ERROR_INVALID_VALUE;
  std::free(p);
  return CUDA_SUCCESS;
}

std::map<void*, Allocation>::iterator lying(CUdeviceptr p) {
  auto at = memory.upper_bound(reinterpret_cast<void*>(p));
  return at != memory.begin() && p < CUdeviceptr((--at)->first) + at->second.bytes ? at : memory.end();
}

template <class T>
T made() {
  return reinterpret_cast<T>(handles++ << 4);
}

}  // namespace

extern "C" {

int fake_unsafe() { return unsafe.exchange(0); }
void fake_slow(int ms) { slow_ms = ms; }
void fake_fails(int status) { fails = status; }
void fake_busy(int yes) { busy = yes; }
int fake_mode() { return mode; }
int fake_contexts() { return contexts; }
int fake_priority(void* stream) { return priorities.at(CUstream(stream)); }
int fake_by_rows() { return by_rows.exchange(0); }
uintptr_t fake_loaded() { return loaded.exchange(0); }
int fake_left() { return int(memory.size() + priorities.size() + events.size()); }

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
// How the binding finds the others: the newest of each name.
CUresult cuGetProcAddress(const char* name, void** out, int, cuuint64_t, CUdriverProcAddressQueryResult*) {
  void* const here = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  *out = dlsym(here, (std::string(name) + "_v2").c_str());
  if (!*out) *out = dlsym(here, name);
  dlclose(here);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* d, int ordinal) { return *d = ordinal + 7, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute attribute, CUdevice d) {
  if (d != 7 || attribute != CU_DEVICE_ATTRIBUTE_MPS_ENABLED) return CUDA_ERROR_INVALID_VALUE;
  return *out = 1, CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice d) {
  if (d != 7) return CUDA_ERROR_INVALID_DEVICE;
  return *c = CUcontext(0x1230), CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext c) {
  if (c != CUcontext(0x1230)) return CUDA_ERROR_INVALID_CONTEXT;
  return ++contexts, CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext* c) { return --contexts, *c = CUcontext(0x1230), CUDA_SUCCESS; }
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, called(); }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* m) { return std::swap(*m, mode), CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult st, const char** text) {
  return *text = st == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OTHER", CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) { return *text = "what it means", CUDA_SUCCESS; }

CUresult cuMemAlloc(CUdeviceptr* p, size_t n) { return take(reinterpret_cast<void**>(p), n); }
CUresult cuMemFree(CUdeviceptr p) { return give(reinterpret_cast<void*>(p)); }
CUresult cuMemHostAlloc(void** p, size_t n, unsigned flags) {
  return flags == CU_MEMHOSTALLOC_PORTABLE ? take(p, n) : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemFreeHost(void* p) { return give(p); }
CUresult cuPointerGetAttribute(void* out, CUpointer_attribute what, CUdeviceptr p) {
  if (CUresult st = called()) return st;
  std::lock_guard<std::mutex> l(lock);
  const auto at = lying(p);
  if (at == memory.end()) return CUDA_ERROR_INVALID_VALUE;
  if (what == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)
    *static_cast<bool*>(out) = at->second.bytes != kNotExportable;
  else if (what == CU_POINTER_ATTRIBUTE_BUFFER_ID)
    *static_cast<unsigned long long*>(out) = at->second.number;
  else
    return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}
CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* bytes, CUdeviceptr p) {
  if (CUresult st = called()) return st;
  std::lock_guard<std::mutex> l(lock);
  const auto at = lying(p);
  if (at == memory.end()) return CUDA_ERROR_INVALID_VALUE;
  *base = CUdeviceptr(at->first), *bytes = at->second.bytes;
  return CUDA_SUCCESS;
}
CUresult cuIpcGetMemHandle(CUipcMemHandle* h, CUdeviceptr p) {
  std::memset(h, 0, sizeof *h);
  std::memcpy(h->reserved + 56, &p, sizeof p);  // the end of what is passed by value
  return called();
}
CUresult cuIpcOpenMemHandle(CUdeviceptr* p, CUipcMemHandle h, unsigned flags) {
  std::memcpy(p, h.reserved + 56, sizeof *p);
  return flags == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS ? called() : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr) { return called(); }

CUresult cuStreamCreateWithPriority(CUstream* s, unsigned flags, int priority) {
  if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> l(lock);
  priorities[*s = made<CUstream>()] = priority;
  return called();
}
CUresult cuStreamDestroy(CUstream s) {
  std::lock_guard<std::mutex> l(lock);
  return priorities.erase(s) ? called() : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuStreamQuery(CUstream) {
  if (CUresult st = called()) return st;
  return busy ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* st) {
  return *st = busy ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE, called();
}
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : called(); }

CUresult cuEventCreate(CUevent* e, unsigned flags) {
  if (flags & ~CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> l(lock);
  events[*e = made<CUevent>()] = true;
  timed[*e] = !flags;
  return called();
}
CUresult cuEventDestroy(CUevent e) {
  std::lock_guard<std::mutex> l(lock);
  return events.erase(e) ? called() : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuEventRecord(CUevent e, CUstream) {
  std::lock_guard<std::mutex> l(lock);
  return events.count(e) ? called() : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuEventQuery(CUevent) {
  if (CUresult st = called()) return st;
  return busy ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float* ms, CUevent first, CUevent last) {
  std::lock_guard<std::mutex> l(lock);
  *ms = 1.5f;
  return timed[first] && timed[last] ? called() : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream) {
  std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), n);
  return called();
}
CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D* what, CUstream) {
  if (what->srcMemoryType != CU_MEMORYTYPE_HOST || what->dstMemoryType != CU_MEMORYTYPE_DEVICE ||
      what->srcPitch < what->WidthInBytes || what->dstPitch < what->WidthInBytes || what->srcXInBytes || what->srcY ||
      what->dstXInBytes || what->dstY)
    return CUDA_ERROR_INVALID_VALUE;
  for (size_t row = 0; row < what->Height; ++row)
    std::memcpy(reinterpret_cast<char*>(what->dstDevice) + row * what->dstPitch,
                static_cast<const char*>(what->srcHost) + row * what->srcPitch, what->WidthInBytes);
  ++by_rows;
  return called();
}
CUresult cuFuncLoad(CUfunction f) { return loaded = uintptr_t(f), called(); }
CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char value, size_t n, CUstream) {
  return std::memset(reinterpret_cast<void*>(p), value, n), called();
}
}
