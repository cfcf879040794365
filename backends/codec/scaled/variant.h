// The weight codec of a backend that stores several formats, and its product.
//
// Formats is what a backend stores: kLayout, its name, and dispatch(matrix, with), which calls
// `with` with the ScaledCodec of the format that a matrix is stored in.
#pragma once

#include "codec/scaled/codec.h"
#include "gemm/driver.h"

namespace ktk {
namespace {

template <class Formats>
struct ScaledWeights {
  static constexpr auto kLayout = Formats::kLayout;
  static constexpr uint32_t kNStep = kNr;

  static size_t size(const ktk_matrix* matrix) {
    return Formats::dispatch(matrix,
                             [&](auto codec) { return decltype(codec)::Layout::size(matrix); });
  }
  static size_t offset(const ktk_matrix* matrix, size_t n) {
    return Formats::dispatch(
        matrix, [&](auto codec) { return decltype(codec)::Layout::offset(matrix, n); });
  }
  static void pack(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin, size_t n_end,
                   void* packed) {
    Formats::dispatch(matrix,
                      [&](auto codec) { codec.pack(matrix, source, n_begin, n_end, packed); });
  }
  static void unpack(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end,
                     float* out, size_t out_stride) {
    Formats::dispatch(
        matrix, [&](auto codec) { codec.unpack(matrix, packed, n_begin, n_end, out, out_stride); });
  }
  static void write(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end,
                    const ktk_export* target) {
    Formats::dispatch(matrix,
                      [&](auto codec) { codec.write(matrix, packed, n_begin, n_end, target); });
  }
};

// The product, by a kernel for the layout that a matrix is stored in.
template <class Formats, template <class Layout> class Kernel>
void gemm_by_layout(const ktk_matmul* mm) {
  Formats::dispatch(mm->matrix,
                    [&](auto codec) { gemm<Kernel<typename decltype(codec)::Layout>>(mm); });
}

// The same by either of two kernels, of which the CPU chooses.
template <class Formats, template <class Layout> class Kernel,
          template <class Layout> class DecodedKernel>
void gemm_decoded_or_not(const ktk_matmul* mm) {
  (decodes_once(mm) ? gemm_by_layout<Formats, DecodedKernel> : gemm_by_layout<Formats, Kernel>)(mm);
}

}  // namespace
}  // namespace ktk
