// The functions of the Kunpeng Math Library that the variant `cblas_s8` calls.
#pragma once

#include <stdint.h>

#include "ktk/abi.h"

namespace ktk::kml {

// Values of the library's enumerations. kFixedOffset: one offset for all of c.
constexpr int kRowMajor = 101, kNoTrans = 111, kTrans = 112, kFixedOffset = 173;

struct Calls {
  // c = alpha * (a + offset_a) x (b + offset_b) + beta * c + *offset_c. The library's integers have
  // 32 or 64 bits, as it was built: on Linux the callee finds either in what is passed here, for
  // arguments beyond the eighth have eight bytes each.
  void (*gemm_s8)(int order, int trans_a, int trans_b, int kind_of_offset, int64_t m, int64_t n,
                  int64_t k, float alpha, const void* a, int64_t lda, int8_t offset_a,
                  const void* b, int64_t ldb, int8_t offset_b, float beta, int32_t* c, int64_t ldc,
                  const int32_t* offset_c);
  // Threads of a call, set for the calling thread or for the process. Either may be missing: some
  // builds of the library have no threads.
  void (*set_threads_local)(int count);
  void (*set_threads)(int count);

  // c[m][n] = a[m][k] x b[n][k]^T, on the calling thread alone.
  void multiply(size_t m, size_t n, size_t k, const int8_t* a, size_t lda, const int8_t* b,
                size_t ldb, int32_t* c, size_t ldc) const;
};

// The variant on what `calls` points at from then on.
const ktk_variant* library_variant(const Calls* calls);

}  // namespace ktk::kml
