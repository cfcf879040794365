// The product: runs of steps are decoded into scratch, 16 KiB that stay in L1 while all tiles of
// rows pass them, and BF16's own tile multiplies them. So every sum is BF16's, bit for bit.
#pragma once

#include "bf16z/decode.h"
#include "gemm/driver.h"

namespace ktk::bf16z {
namespace {

// Where the blocks of a product are, and what reads them.
template <class Decoder>
class BlockKernel {
 public:
  static constexpr size_t kNr = bf16z::kNr;

  explicit BlockKernel(const ktk_matmul* mm)
      : reader_({mm->matrix, static_cast<const char*>(mm->weight), mm->n_begin / kNr}),
        scratch_(static_cast<char*>(mm->scratch)),
        matrix_(mm->matrix),
        weight_(static_cast<const char*>(mm->weight)),
        steps_(num_steps(mm->matrix)),
        header_bytes_(header_bytes(steps_)) {}

  size_t slabs() const { return steps_; }
  size_t offset(size_t slab) const { return header_bytes_ + slab * kStepBytes; }

  void begin_block(const char* header, float*) {
    const size_t index = static_cast<size_t>(header - weight_) / offset(steps_);
    const BlockParts<const char> block(matrix_, weight_, index);
    const size_t bytes = reinterpret_cast<const Header*>(header)->patches * sizeof(uint32_t);
    for (size_t at = 0; at < bytes; at += kLine) prefetch_l1(block.side + at);
    reader_ = BlockReader<Decoder>(block);
  }

 protected:
  BlockReader<Decoder> reader_;
  char* scratch_;

 private:
  const ktk_matrix* matrix_;
  const char* weight_;
  size_t steps_, header_bytes_;
};

// While a tile uses four lines of plain weights, it fetches three of the next run.
inline size_t fetch_step(size_t step) { return ceil_div(step * 3, 4); }

// How rows are dealt out, as a kernel of BF16 says (gemm/driver.h).
template <class Plain>
struct Dealing {};
template <class Plain>
  requires requires { Plain::kShortRows; }
struct Dealing<Plain> {
  static constexpr size_t kRowSums = Plain::kRowSums;
  static constexpr size_t kShortRows = Plain::kShortRows;
};

// Multiplies what it decodes with the tile of a kernel of BF16.
template <class Plain, class Decoder>
class DecodedKernel : public BlockKernel<Decoder>, public Dealing<Plain> {
  using Base = BlockKernel<Decoder>;

 public:
  using Base::Base;
  static constexpr size_t kMr = Plain::kMr;
  static constexpr size_t kRowStep = row_step<Plain>();
  static constexpr size_t kLineProducts = Plain::kLineProducts;
  static constexpr size_t kRunSlabs = kRunBytes / kPlainStepBytes;
  static constexpr bool kFetchesNextRun = true;

  static size_t passes(size_t rows) { return Plain::passes(rows); }

  void prepare_run(const Run& run) {
    char* out = Base::scratch_;
    for (size_t step = run.begin; step < run.end; ++step, out += kPlainStepBytes) {
      Base::reader_.read_step(out);
    }
    keep_order();
  }

  void tile(const Tile& t) const {
    Tile plain = t;
    plain.block = Base::scratch_ - t.begin * kPlainStepBytes;
    plain.fetch.step = plain.bulk_fetch.step = fetch_step(t.fetch.step);
    plain.from_memory = false;
    Plain::tile(plain);
  }
};

inline size_t scratch_size(const ktk_matrix*, size_t) { return kRunBytes; }

// A product whose matrix may be plain: then it is one of BF16.
template <RunProduct* kRunDecoded, RunProduct* kRunPlain>
void run(const ktk_matmul* mm) {
  if (form_of(mm->weight) == kTwelveBits) return kRunDecoded(mm);
  ktk_matmul plain = *mm;
  plain.weight = plain_weight(mm->weight);
  kRunPlain(&plain);
}

}  // namespace
}  // namespace ktk::bf16z
