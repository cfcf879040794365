// What the kernels of all variants state in the same way (gemm/driver.h): where weights are.
#pragma once

#include "bf16/layout.h"
#include "gemm/driver.h"

namespace ktk::bf16 {
namespace {

class KernelBase {
 public:
  static constexpr size_t kNr = bf16::kNr;

  explicit KernelBase(const ktk_matmul* mm) : slabs_(num_steps(mm->matrix)) {}
  size_t slabs() const { return slabs_; }
  static size_t offset(size_t slab) { return slab * kStepBytes; }

 private:
  size_t slabs_;
};

// A tile's weights and rows at the beginning of its run.
inline const char* first_weight(const Tile& tile) {
  return tile.block + KernelBase::offset(tile.begin);
}
template <size_t kActBytes>
inline const char* first_act(const Tile& tile) {
  return tile.act + tile.begin * kStepDepth * kActBytes;
}

}  // namespace
}  // namespace ktk::bf16
