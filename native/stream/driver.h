// The few functions of the CUDA driver that let a stream wait for the CPU, found when they are
// first wanted: one build for machines with and without a GPU.
#pragma once

#include <cstdint>
#include <string>

namespace ktk {

class CudaDriver {
 public:
  using HostFunction = void (*)(void*);

  // Loads libcuda.so.1, or what KTK_CUDA_LIBRARY names, once. Throws std::runtime_error with the
  // loader's reason, and tries again the next time.
  static const CudaDriver& get();

  // Queues fn(argument) behind what the stream has; while a stream is captured, makes it a node of
  // the graph. Throws std::runtime_error with the driver's own words when it refuses.
  void launch(uintptr_t stream, HostFunction fn, void* argument) const;
  bool capturing(uintptr_t stream) const;
  const std::string& path() const { return path_; }

 private:
  explicit CudaDriver(const std::string& path);
  void check(int code, const char* what) const;

  // The types of cuda.h, which is not needed to build: handles are pointers, results are ints.
  using Handle = void*;
  std::string path_;
  int (*init_)(unsigned) = nullptr;
  int (*launch_host_func_)(Handle, HostFunction, void*) = nullptr;
  int (*stream_is_capturing_)(Handle, int*) = nullptr;
  int (*stream_get_ctx_)(Handle, Handle*) = nullptr;
  int (*ctx_push_)(Handle) = nullptr;
  int (*ctx_pop_)(Handle*) = nullptr;
  int (*get_error_string_)(int, const char**) = nullptr;
};

}  // namespace ktk
