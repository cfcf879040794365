// The functions of a table: those of block types, or those of floats.
#pragma once

#include "llamafile/floats/layout.h"

namespace ktk::llamafile {
namespace {

inline const ktk_matrix* matrix_of(const ktk_matrix* matrix) { return matrix; }
inline const ktk_matrix* matrix_of(const ktk_matmul* mm) { return mm->matrix; }

template <auto kOfBlocks, auto kOfFloats>
struct Either;

// Both take something with a matrix first.
template <class Result, class First, class... Rest, Result (*kOfBlocks)(First, Rest...),
          Result (*kOfFloats)(First, Rest...)>
struct Either<kOfBlocks, kOfFloats> {
  static Result call(First first, Rest... rest) {
    if (floats::is_float(matrix_of(first)->format)) return kOfFloats(first, rest...);
    return kOfBlocks(first, rest...);
  }
};

template <auto kOfBlocks, auto kOfFloats>
constexpr auto either = Either<kOfBlocks, kOfFloats>::call;

}  // namespace
}  // namespace ktk::llamafile
