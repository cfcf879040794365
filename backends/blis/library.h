// The functions of a BLAS library that the variants call. The kernel files see them through this
// struct only; the module fills it before the table leaves it, and from then on it never changes.
#pragma once

#include <stdint.h>

#include "ktk/abi.h"

namespace ktk::blis {

// LPGEMM is AMD's addition to BLIS, now in AOCL-DLP. Order and transposes are letters ('r'
// row-major, 'n' plain, 't' transposed), sizes are elements, and the last argument of all three is
// a pointer that may be NULL. The reorder calls of AOCL-BLIS do not have it yet; passing it does no
// harm.
struct Calls {
  size_t (*reorder_size)(char order, char trans, char matrix, int64_t k, int64_t n, void* meta);
  void (*reorder)(char order, char trans, char matrix, const int8_t* b, int8_t* out, int64_t k,
                  int64_t n, int64_t ldb, void* meta);
  // c = alpha * a x b + beta * c in int32. `format` says how a and b come: 'n' as they are, 'r'
  // reordered. Prints a line and leaves c alone where the CPU lacks what it needs.
  void (*gemm_s8)(char order, char trans_a, char trans_b, int64_t m, int64_t n, int64_t k,
                  int32_t alpha, const int8_t* a, int64_t lda, char format_a, const int8_t* b,
                  int64_t ldb, char format_b, int32_t beta, int32_t* c, int64_t ldc, void* post);

  // cblas_sgemm with integers of 32 bits.
  void (*sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc);

  // Makes the library use the calling thread alone. To be called before any of the others, in every
  // thread: AMD's libraries keep the number per thread.
  void (*one_thread)();
};

// What a call multiplies at most, of weights that the library reordered, and what of a layout's
// name does not depend on the library.
constexpr size_t kNr = 128, kDepth = 512;
constexpr char kTilesLayout[] = "lpgemm-n128k512";

// The one symbol of a kernel file.
struct Kernels {
  ktk_variant lpgemm_int8, sgemm;
  void (*use)(const Calls* calls);
};

// Values of CBLAS's enumerations.
constexpr int kRowMajor = 101, kNoTrans = 111, kTrans = 112;

}  // namespace ktk::blis
