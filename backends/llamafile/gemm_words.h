// Products with sums of words (word_tile.h): tiles of few rows decode codes as they read them; for
// more rows codes are decoded once.
#pragma once

#include "llamafile/kernel.h"
#include "llamafile/word_tile.h"

namespace ktk::llamafile {
namespace {

// Rows of a tile: with two registers of n, the words and t of three are in registers, and the sums
// of four where weights are signed.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kWordRows = 1, kSignedRows = 1, kFewWordRows = 1;
#else
constexpr size_t kWordRows = 3, kSignedRows = 4, kFewWordRows = 2;
#endif
// Of a tile that decodes what it reads.
template <Kind kKind, int kWordSteps>
constexpr size_t read_rows =
    kWordSteps == 0 && !defers_d(kKind.scaling) ? kSignedRows : kFewWordRows;
// Up to two tiles do so: decoding to scratch takes as long as two rows or more.
constexpr size_t kReadRows = 2 * kFewWordRows;

// Scales of a super-block in either form, by code for the header of a type: without branches.
template <size_t kType>
void load_all_scales(const Header& at, const uint8_t* super_block, size_t sub_blocks,
                     int32_t* scales) {
  constexpr BlockType kOf = kTypes[kType];
  if constexpr (defers_d(scaling_of(kOf))) {
    load_word_scales(super_block + at.sub, sub_blocks, table_offset(kOf), scales);
  } else {
    float* const to = reinterpret_cast<float*>(scales);
    if (sub_blocks == kSubBlocks) {
      load_scales(kOf, header(kOf, kSubBlocks), super_block, kSubBlocks, to);
    } else {
      load_scales(kOf, at, super_block, sub_blocks, to);
    }
  }
}
using LoadScales = void(const Header&, const uint8_t* super_block, size_t sub_blocks,
                        int32_t* scales);
inline LoadScales* scale_loader(const BlockType& type) {
  static constexpr auto kLoad = type_table([]<size_t kType> { return &load_all_scales<kType>; });
  return kLoad[type];
}

// Tiles that decode codes as they read them.
template <Kind kKind, int kWordSteps>
class GemmFewWords : public KernelBase {
  static constexpr Scaling kScaling = kKind.scaling;
  using TileOf = WordTile<kKind, kWordSteps, false>;

 public:
  static constexpr size_t kMr = read_rows<kKind, kWordSteps>;
  static constexpr size_t kLineProducts = line_products(kKind.bits);
  static constexpr size_t kRunSlabs = 1;

  explicit GemmFewWords(const ktk_matmul* mm)
      : KernelBase(mm),
        load_scales_(scale_loader(type())),
        offset_(table_offset(type())),
        table_(type(), offset_),
        dst_stride_(mm->dst_stride),
        rows_(mm->m) {}

  static size_t passes(size_t) { return 1; }
  void begin_block(const char*, float* dst) const { clear_rows(dst, dst_stride_, rows_); }
  void prepare_run(const Run& run) {
    const size_t count = sub_blocks(run.begin, run.end);
    const Header& at = layout_.header_of(count);
    const uint8_t* const super_block = this->super_block(run, run.begin);
    load_scales_(at, super_block, count, scales_);
    if constexpr (kKind.has_shifts) {
      write_shifts<kKind>(Shifts(table_, super_block, at), count, shifts_);
    }
  }

  void tile(const Tile& t) {
    const size_t count = sub_blocks(t.begin, t.end), at = t.begin * kSubBlocks;
    const uint8_t* const super_block = this->super_block(t, t.begin);
    const uint8_t* const codes = this->codes(super_block, count);
    Fetch fetch = t.fetch;
    for (const uint8_t* line = super_block; line < codes; line += kLine) fetch.next();
    const WordOperands operands = {
        .table = &table_,
        .offset = offset_,
        .codes = codes,
        .scales = scales_,
        .shifts = shifts_,
        .sub_blocks = count,
        .lines_to_fetch = 0,
        .act = act(t, at),
        .act_groups = act_groups(t, at),
        .act_stride = t.act_stride,
    };
    if constexpr (defers_d(kScaling)) {
      alignas(kLine) float sums[kMr * kNr];
      clear_rows(sums, kNr, t.rows);
      kTiles[t.rows](operands, sums, kNr, fetch);
      add_deferred(type(), super_block, sums, t.rows, t.dst, t.dst_stride);
    } else {
      kTiles[t.rows](operands, t.dst, t.dst_stride, fetch);
    }
  }

 private:
  static constexpr size_t kDwords = TileOf::kScaleDwords;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &TileOf::template add<kRows>; });

  LoadScales* const load_scales_;
  const int offset_;
  const CodeTable table_;
  const size_t dst_stride_, rows_;
  alignas(kLine) int32_t scales_[kSubBlocks * kDwords];
  alignas(kLine) uint8_t shifts_[kKind.has_shifts ? kSubBlocks * shift_bytes(kScaling) : 1];
};

// More rows: tiles of them multiply operands that were written before.
//
//   scratch   | operands of up to four super-blocks, two if signed | their scales | deferred d |
//
// Reading operands from L2 costs tiles less than beginning more often, with rows of dst and act.
constexpr size_t kWordDwords = kWordSlabs * kSubBlocks * kMostScales;
constexpr size_t kWordScratch = kWordOperands + (kWordDwords + kWordSlabs * kNr) * sizeof(int32_t);

inline void write_sizes(uint8_t* operands, size_t bytes) {
  for (size_t at = 0; at < bytes; at += sizeof(Dot::Int)) {
    Dot::store_bytes(operands + kSizesAt + at, Dot::size_of_bytes(Dot::load_bytes(operands + at)));
  }
}

template <Kind kKind, int kWordSteps>
class GemmWords : public KernelBase {
  static constexpr Scaling kScaling = kKind.scaling;
  static constexpr bool kSigned = kWordSteps == 0;
  using TileOf = WordTile<Kind{8, kScaling, false, false}, kWordSteps, true>;

 public:
  static constexpr size_t kMr = kSigned ? kSignedRows : kWordRows;
  static constexpr size_t kLineProducts = line_products(kKind.bits);
  static constexpr size_t kRunSlabs = kSigned ? kWordSlabs / 2 : kWordSlabs;
  static constexpr bool kFetchesNextRun = true;

  explicit GemmWords(const ktk_matmul* mm)
      : KernelBase(mm),
        load_scales_(scale_loader(type())),
        offset_(table_offset(type())),
        table_(type(), offset_),
        dst_stride_(mm->dst_stride),
        rows_(mm->m),
        operands_(static_cast<uint8_t*>(mm->scratch)),
        scales_(reinterpret_cast<int32_t*>(operands_ + kWordOperands)),
        d_(reinterpret_cast<float*>(scales_ + kWordDwords)) {}

  static size_t passes(size_t) { return 1; }
  void begin_block(const char*, float* dst) const { clear_rows(dst, dst_stride_, rows_); }
  void prepare_run(const Run& run) {
    for_each_super_block(run, [&](const uint8_t* super_block, size_t count, size_t done) {
      const Header& at = layout_.header_of(count);
      load_scales_(at, super_block, count, scales_ + done * kDwords);
      if constexpr (defers_d(kScaling)) {
        load_deferred_ds(type(), super_block, d_ + done / kSubBlocks * kNr);
      }
      uint8_t* const operands = operands_ + done * kOperandBytes;
      write_operands<kKind, 0, are_words<kKind, kWordSteps>>(table_, super_block, at, count,
                                                             operands);
      if constexpr (kSigned) write_sizes(operands, count * kOperandBytes);
    });
  }

  void tile(const Tile& t) const {
    const size_t count = sub_blocks(t.begin, t.end), at = t.begin * kSubBlocks;
    Fetch fetch = t.fetch.of_lines();
    WordOperands operands = {
        .table = &table_,
        .offset = offset_,
        .codes = operands_,
        .scales = scales_,
        .shifts = nullptr,
        .sub_blocks = count,
        .lines_to_fetch = lines_to_fetch(t),
        .act = act(t, at),
        .act_groups = act_groups(t, at),
        .act_stride = t.act_stride,
    };
    if constexpr (!defers_d(kScaling)) {
      kTiles[t.rows](operands, t.dst, t.dst_stride, fetch);
    } else {
      operands.sub_blocks = kSubBlocks;  // types with one d for 256 values have no others
      for (size_t done = 0; done < count; done += kSubBlocks) {
        alignas(kLine) float sums[kMr * kNr];
        clear_rows(sums, kNr, t.rows);
        operands.codes = operands_ + done * kOperandBytes;
        operands.scales = scales_ + done * kDwords;
        operands.act = act(t, at + done);
        operands.act_groups = act_groups(t, at + done);
        kTiles[t.rows](operands, sums, kNr, fetch);
        add_deferred(d_ + done / kSubBlocks * kNr, sums, t.rows, t.dst, t.dst_stride);
      }
    }
  }

 private:
  static constexpr size_t kDwords = TileOf::kScaleDwords;
  static constexpr auto kTiles =
      row_table<kMr>([]<size_t kRows> { return &TileOf::template add<kRows>; });

  LoadScales* const load_scales_;
  const int offset_;
  const CodeTable table_;
  const size_t dst_stride_, rows_;
  uint8_t* const operands_;
  int32_t* const scales_;
  float* const d_;
};

}  // namespace
}  // namespace ktk::llamafile
