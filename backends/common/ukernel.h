// Rows of a variant's table of micro-kernels.
#pragma once

#include "ktk/abi.h"

namespace ktk {
namespace {

using RunProduct = void(const ktk_matmul*);
using ScratchSize = size_t(const ktk_matrix*, size_t);

// For up to m_max rows.
constexpr ktk_ukernel make_ukernel(const char* name, size_t m_max, RunProduct* run,
                                   ScratchSize* scratch_size = nullptr) {
  return {
      .struct_size = sizeof(ktk_ukernel),
      .name = name,
      .m_max = m_max,
      .scratch_size = scratch_size,
      .run = run,
  };
}

// For any number of rows.
constexpr ktk_ukernel make_ukernel(const char* name, RunProduct* run,
                                   ScratchSize* scratch_size = nullptr) {
  return make_ukernel(name, SIZE_MAX, run, scratch_size);
}

}  // namespace
}  // namespace ktk
