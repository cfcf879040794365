#include "kml/find.h"

#include <cstdlib>

namespace ktk::kml {
namespace {

constexpr const char* kVariable = "KTK_KML_LIBRARY";

// Sizes off every step, rows longer than what is used of them, the largest codes, and a result that
// has to be overwritten.
void self_test(const Calls& calls) {
  constexpr size_t kM = 5, kN = 7, kK = 44, kStride = 48, kDst = 9;
  int8_t a[kM * kStride], b[kN * kStride];
  int32_t c[kM * kDst];
  unsigned state = 1;
  const auto code = [&state] {
    state = state * 1103515245u + 12345u;
    return static_cast<int8_t>(state >> 16);
  };
  for (int8_t& x : a) x = code();
  for (int8_t& x : b) x = code();
  for (size_t k = 0; k < kK; ++k) a[k] = b[k] = -128;
  for (int32_t& x : c) x = 0x5a5a5a5a;
  calls.multiply(kM, kN, kK, a, kStride, b, kStride, c, kDst);
  for (size_t i = 0; i < kM; ++i) {
    for (size_t j = 0; j < kDst; ++j) {
      int32_t expected = j < kN ? 0 : 0x5a5a5a5a;
      for (size_t k = 0; j < kN && k < kK; ++k) expected += a[i * kStride + k] * b[j * kStride + k];
      if (c[i * kDst + j] != expected) {
        throw std::runtime_error("gives " + std::to_string(c[i * kDst + j]) + " instead of " +
                                 std::to_string(expected) + " in a product of " +
                                 std::to_string(kM) + " x " + std::to_string(kN) + " x " +
                                 std::to_string(kK));
      }
    }
  }
}

}  // namespace

Found find() {
  Found found;
  const LibraryRequest request = {
      .variable = kVariable,
      .names = {"libkml_rt.so", "libkblas.so"},
      .modes = {{
          .name = "cblas_gemm_s8s8s32",
          .symbols = {"cblas_gemm_s8s8s32"},
          .adopt =
              [&found](const VendorLibrary& library) {
                Calls calls{};
                library.bind("cblas_gemm_s8s8s32", calls.gemm_s8);
                library.bind("BlasSetNumThreadsLocal", calls.set_threads_local);
                library.bind("BlasSetNumThreads", calls.set_threads);
                self_test(calls);
                found.calls = calls;
              },
      }},
  };
  const LibrarySearch search = find_library(request);
  const char* wanted = std::getenv(kVariable);
  if (search.library) {
    found.library = search.library;
    found.facts = {{"library", search.library->path()}, {"mode", join(search.modes, ", ")}};
  } else if (wanted && *wanted) {
    found.warning = "KML computes with its own kernels: " + search.failure(request);
  }
  return found;
}

}  // namespace ktk::kml
