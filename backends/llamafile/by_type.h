// A micro-kernel that is another one for each block type.
#pragma once

#include "ktk/backend.h"
#include "llamafile/scaling.h"

namespace ktk::llamafile {
namespace {

struct TypeProduct {
  RunProduct* run;
  ScratchSize* scratch_size;
};

// kChoose is called as type_table() calls it, and returns TypeProduct.
template <auto kChoose>
struct ByType {
  static const TypeProduct& of(const ktk_matrix* matrix) {
    static constexpr auto kTable = type_table(kChoose);
    return kTable[block_type(matrix->format.element)];
  }
  static void run(const ktk_matmul* mm) { of(mm->matrix).run(mm); }
  static size_t scratch_size(const ktk_matrix* matrix, size_t m) {
    return of(matrix).scratch_size(matrix, m);
  }
};

}  // namespace
}  // namespace ktk::llamafile
