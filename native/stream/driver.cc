#include "stream/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace ktk {
namespace {

constexpr const char* kVariable = "KTK_CUDA_LIBRARY";
constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED

template <typename Function>
void find(void* library, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) {
    throw std::runtime_error(path + " has no " + name + ": it is not a CUDA driver ktk can use");
  }
}

}  // namespace

const CudaDriver& CudaDriver::get() {
  static std::mutex mutex;
  static std::unique_ptr<CudaDriver>& driver = *new std::unique_ptr<CudaDriver>;  // for streams
  const std::lock_guard lock(mutex);
  if (!driver) {
    const char* named = std::getenv(kVariable);
    driver.reset(new CudaDriver(named && *named ? named : "libcuda.so.1"));
  }
  return *driver;
}

CudaDriver::CudaDriver(const std::string& path) : path_(path) {
  // Never closed: streams outlive whoever could close it.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    throw std::runtime_error(
        "a CUDA stream was given, but the CUDA driver cannot be loaded (" + std::string(dlerror()) +
        "); pass stream 0 or None for CPU tensors, or name the driver in " + kVariable);
  }
  find(library, path, "cuInit", init_);
  find(library, path, "cuLaunchHostFunc", launch_host_func_);
  find(library, path, "cuStreamIsCapturing", stream_is_capturing_);
  find(library, path, "cuStreamGetCtx", stream_get_ctx_);
  find(library, path, "cuCtxPushCurrent_v2", ctx_push_);
  find(library, path, "cuCtxPopCurrent_v2", ctx_pop_);
  find(library, path, "cuGetErrorString", get_error_string_);
  check(init_(0), "cuInit");
}

void CudaDriver::check(int code, const char* what) const {
  if (code == 0) return;
  const char* text = nullptr;
  get_error_string_(code, &text);
  throw std::runtime_error(std::string(what) + " failed: " + (text ? text : "unknown error") +
                           " (CUDA error " + std::to_string(code) + ")");
}

void CudaDriver::launch(uintptr_t stream, HostFunction fn, void* argument) const {
  const Handle handle = reinterpret_cast<Handle>(stream);
  // The stream's context need not be current on this thread, and launching wants it so. Streams of
  // green contexts do not tell theirs; who uses them has made it current.
  Handle context = nullptr;
  const int told = stream_get_ctx_(handle, &context);
  if (told != kNotSupported) {
    check(told, "cuStreamGetCtx");
    check(ctx_push_(context), "cuCtxPushCurrent");
  }
  const int launched = launch_host_func_(handle, fn, argument);
  // The result of a pop would hide whether the function was queued, and it cannot fail after a
  // push.
  Handle popped = nullptr;
  if (told != kNotSupported) ctx_pop_(&popped);
  check(launched, "cuLaunchHostFunc");
}

bool CudaDriver::capturing(uintptr_t stream) const {
  int status = 0;
  check(stream_is_capturing_(reinterpret_cast<Handle>(stream), &status), "cuStreamIsCapturing");
  // 2 is a capture that an earlier error has made void; what is launched now fails with the reason.
  return status != 0;
}

}  // namespace ktk
