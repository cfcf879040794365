// What all kernels for block types state in the same way (gemm/driver.h): slabs are super-blocks.
#pragma once

#include "gemm/driver.h"
#include "llamafile/dot.h"

namespace ktk::llamafile {
namespace {

class KernelBase {
 public:
  static constexpr size_t kNr = llamafile::kNr;

  explicit KernelBase(const ktk_matmul* mm)
      : layout_(mm->matrix),
        act_groups_(group_offset(mm->matrix)),
        whole_bytes_(super_block_bytes(layout_.type, kSubBlocks)),
        block_bytes_(llamafile::block_bytes(mm->matrix)) {}

  size_t slabs() const { return ceil_div(layout_.sub_blocks, kSubBlocks); }
  size_t offset(size_t slab) const { return smaller(slab * whole_bytes_, block_bytes_); }

 protected:
  const BlockType& type() const { return layout_.type; }
  size_t sub_blocks(size_t begin, size_t end) const {
    return smaller(end * kSubBlocks, layout_.sub_blocks) - begin * kSubBlocks;
  }
  const uint8_t* super_block(const Run& run, size_t slab) const {
    return reinterpret_cast<const uint8_t*>(run.block) + offset(slab);
  }
  // Codes of a super-block of so many sub-blocks.
  const uint8_t* codes(const uint8_t* super_block, size_t count) const {
    return super_block + layout_.header_of(count).end;
  }
  // Calls visit(super-block, its sub-blocks, those before it) for the super-blocks of a run.
  template <class Visit>
  void for_each_super_block(const Run& run, Visit visit) const {
    for (size_t slab = run.begin, done = 0; slab < run.end; ++slab, done += kSubBlocks) {
      visit(super_block(run, slab), sub_blocks(slab, slab + 1), done);
    }
  }
  // What a tile fetches in every sub-block, for its share of the run.
  size_t lines_to_fetch(const Tile& t) const {
    const size_t bytes = (offset(t.end) - offset(t.begin)) / kLine * t.fetch.step;
    return ceil_div(bytes, sub_blocks(t.begin, t.end) * kLine);
  }
  // Act values, and ActGroups, of a tile's first row at sub-block number `at` of k.
  static const char* act(const Tile& t, size_t at) { return t.act + at * kSubBlock; }
  const char* act_groups(const Tile& t, size_t at) const {
    return t.act + act_groups_ + at * sizeof(ActGroup);
  }

  const BlockLayout layout_;

 private:
  size_t act_groups_, whole_bytes_, block_bytes_;
};

// Lines of operands that a line of codes becomes.
constexpr size_t line_products(size_t bits) { return ceil_div(8, bits); }

}  // namespace
}  // namespace ktk::llamafile
