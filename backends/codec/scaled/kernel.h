// What the kernels of all instruction sets state in the same way (gemm/driver.h): where weights and
// their scales are, and what sums start at.
#pragma once

#include <string.h>

#include "codec/scaled/layout.h"
#include "gemm/driver.h"

namespace ktk {
namespace {

// A slab is a step, or as many as a group has. The last one may be short of a step.
template <class Layout>
class ScaledKernel {
 public:
  using Scales = typename Layout::Scales;
  static constexpr size_t kNr = ktk::kNr;
  static constexpr size_t kSlabSteps = ceil_div(Scales::kGroupDepth, kStepDepth);
  static constexpr size_t kSlabDepth = kSlabSteps * kStepDepth;

  explicit ScaledKernel(const ktk_matmul* mm)
      : m_(mm->m),
        dst_stride_(mm->dst_stride),
        steps_(Layout::num_steps(mm->matrix)),
        header_bytes_(Layout::header_bytes(mm->matrix)) {}

  size_t slabs() const { return ceil_div(steps_, kSlabSteps); }
  size_t offset(size_t slab) const {
    return header_bytes_ + smaller(slab * kSlabSteps, steps_) * Layout::kStepBytes;
  }
  static size_t passes(size_t) { return 1; }

  // Sums of all rows start at `start`, with which a block begins.
  void begin_block(const char* block, float* dst) const {
    for (size_t i = 0; i < m_; ++i) memcpy(dst + i * dst_stride_, block, kStartBytes);
  }

  // The steps of a run.
  const char* begin(const Run& run) const { return run.block + offset(run.begin); }
  const char* end(const Run& run) const { return run.block + offset(run.end); }

  // The scales that a block has ahead of its codes, from the first group of a run on.
  static const char* scales(const Run& run) {
    return run.block + kStartBytes + (Scales::kPerGroup ? run.begin * sizeof(float) : 0);
  }

  // A tile's act at the beginning of its run. kBytes: of one k.
  template <size_t kBytes>
  static const char* act(const Tile& tile) {
    return tile.act + tile.begin * kSlabDepth * kBytes;
  }

 private:
  size_t m_, dst_stride_, steps_, header_bytes_;
};

}  // namespace
}  // namespace ktk
