// The product with AMX, for many rows: 16 x 16 sums, 32 deep, one instruction (gemm/amx.h).
//
// B tiles are operands (operands.h) with the sign of the weights; a plane of 128 bytes is a row of
// both B tiles. Two super-blocks are written to scratch, 16 KiB, before all rows pass over them. A
// tile is as deep as a group of the type, 32 or 16, because the scales change there, and its sums
// can only leave through memory. They are scaled and added to dst while the next sub-block is
// multiplied: at once, that would wait for the stores and the tiles would wait for it.
//
//   scratch   | scales | operands | sums of two spans of sub-blocks | sums of a super-block |
#pragma once

#include "gemm/amx.h"
#include "llamafile/epilogue.h"
#include "llamafile/kernel.h"
#include "llamafile/operands.h"

namespace ktk::llamafile {
namespace {

constexpr size_t kAmxMr = 2 * kAmxRows;
constexpr size_t kSumsOfGroup = kAmxMr * kNr;  // of a tile of rows
constexpr size_t kMostGroups = 4;              // of a span

// Signed by signed bytes.
struct TilesSigned {
  static void top_left() { _tile_dpbssd(0, 4, 6); }
  static void top_right() { _tile_dpbssd(1, 4, 7); }
  static void bottom_left() { _tile_dpbssd(2, 5, 6); }
  static void bottom_right() { _tile_dpbssd(3, 5, 7); }
};

// The sums of one group.
template <bool kBothHalves>
inline void multiply_group(const uint8_t* operands, const char* act, size_t act_stride,
                           int32_t* sums) {
  zero_sums<kBothHalves>();
  add_tiles<TilesSigned, kBothHalves>(act, act_stride, reinterpret_cast<const char*>(operands),
                                      kLine, kPlaneBytes);
  store_sums<kBothHalves>(sums, kNr);
}

template <Kind kKind>
class GemmAmx : public KernelBase {
  static constexpr Scaling kScaling = kKind.scaling;
  using E = Epilogue<kScaling>;
  static constexpr size_t kGroups = E::kGroups, kSpan = E::kSpan;

 public:
  static constexpr size_t kMr = kAmxMr;
  static constexpr size_t kRowStep = kAmxRows;
  static constexpr size_t kLineProducts = 1;
  static constexpr size_t kRunSlabs = 2;
  static constexpr bool kFetchesNextRun = true;

  explicit GemmAmx(const ktk_matmul* mm)
      : KernelBase(mm),
        table_(type(), 0),
        dst_stride_(mm->dst_stride),
        rows_(mm->m),
        scales_(static_cast<float*>(mm->scratch)),
        operands_(reinterpret_cast<uint8_t*>(scales_ + kRunSubBlocks * kMostScales)),
        sums_(reinterpret_cast<int32_t*>(operands_ + kRunSubBlocks * kOperandBytes)),
        sums_before_(sums_ + kMostGroups * kSumsOfGroup),
        deferred_(reinterpret_cast<float*>(sums_before_ + kMostGroups * kSumsOfGroup)) {
    clear_rows(deferred_, kNr, kMr);
  }

  static size_t scratch_size(const ktk_matrix*, size_t) {
    return kRunSubBlocks * (kOperandBytes + kMostScales * sizeof(float)) +
           (2 * kMostGroups * sizeof(int32_t) + sizeof(float)) * kSumsOfGroup;
  }

  static size_t passes(size_t) { return 1; }
  void begin_block(const char*, float* dst) const { clear_rows(dst, dst_stride_, rows_); }

  void prepare_run(const Run& run) {
    add_pending();  // its scales are about to be overwritten
    for_each_super_block(run, [&](const uint8_t* super_block, size_t count, size_t done) {
      const Header& at = layout_.header_of(count);
      load_scales(type(), at, super_block, count, scales_ + done * num_scales(kScaling));
      write_operands<kKind, 0>(table_, super_block, at, count, operands_ + done * kOperandBytes);
    });
    tile_memory_barrier();
  }

  void tile(const Tile& t) {
    const size_t count = sub_blocks(t.begin, t.end), first = t.begin * kSubBlocks;
    const size_t bytes = offset(t.end) - offset(t.begin);
    const auto multiply = t.rows > kAmxRows ? multiply_group<true> : multiply_group<false>;
    BulkFetch fetch = t.bulk_fetch;
    for (size_t i = 0; i < count; i += kSpan) {
      fetch.next(ceil_div(kSpan * bytes, count * kLine));
      for (size_t g = 0; g < kSpan * kGroups; ++g) {
        multiply(operands_ + i * kOperandBytes + g * kOperandBytes / kGroups,
                 act(t, first + i) + g * kSubBlock / kGroups, t.act_stride,
                 sums_ + g * kSumsOfGroup);
      }
      add_pending();
      const bool ends_super_block = defers_d(kScaling) && (i + kSpan) % kSubBlocks == 0;
      pending_ = {
          .sums = sums_,
          .act_groups = act_groups(t, first + i),
          .act_stride = t.act_stride,
          .scales = scales_ + i * num_scales(kScaling),
          .rows = t.rows,
          .dst = t.dst,
          .dst_stride = t.dst_stride,
          .ended = ends_super_block ? super_block(t, t.begin + i / kSubBlocks) : nullptr,
      };
      int32_t* const swap = sums_;
      sums_ = sums_before_;
      sums_before_ = swap;
    }
  }

  void end_block(size_t, float*) { add_pending(); }

 private:
  // Sums that are yet to be added to dst, or to those of a super-block.
  struct Pending {
    const int32_t* sums;     // of all groups of a span
    const char* act_groups;  // first row, first sub-block
    size_t act_stride;
    const float* scales;
    size_t rows;  // 0: nothing
    float* dst;
    size_t dst_stride;
    const uint8_t* ended;  // the super-block that ends here, of types that defer d
  };

  void add_pending() {
    const Pending& p = pending_;
    if (p.rows == 0) return;
    float* const dst = defers_d(kScaling) ? deferred_ : p.dst;
    const size_t dst_stride = defers_d(kScaling) ? kNr : p.dst_stride;
    for (size_t n = 0; n < kNr; n += Dot::kLanes) add_columns(n, dst, dst_stride);
    if (p.ended) {
      add_deferred(type(), p.ended, dst, p.rows, p.dst, p.dst_stride);
      clear_rows(dst, dst_stride, p.rows);
    }
    pending_.rows = 0;
  }

  // A register of n.
  void add_columns(size_t n, float* dst, size_t dst_stride) const {
    const Pending& p = pending_;
    Dot::Float scales[kSpan][num_scales(kScaling) / kNr];
    for (size_t i = 0; i < kSpan; ++i) {
      for (size_t j = 0; j < num_scales(kScaling) / kNr; ++j) {
        scales[i][j] = Dot::load(p.scales + i * num_scales(kScaling) + j * kNr + n);
      }
    }
    for (size_t r = 0; r < p.rows; ++r) {
      const ActGroup* act = reinterpret_cast<const ActGroup*>(p.act_groups + r * p.act_stride);
      const int32_t* from = p.sums + r * kNr + n;
      float* to = dst + r * dst_stride + n;
      Dot::Float t = Dot::set1(0);
#pragma GCC unroll 2
      for (size_t i = 0; i < kSpan; ++i) {
        t = E::add_group(
            i == 0, t, act[i],
            [&](size_t g) {
              return Dot::convert(Dot::load_bytes(from + (i * kGroups + g) * kSumsOfGroup));
            },
            [&](size_t g) { return scales[i][g]; },
            [&](size_t g) { return scales[i][kGroups + g]; });
      }
      constexpr size_t kLast = kSpan - 1;
      Dot::store(to, E::finish(
                         t, act[kLast], Dot::load(to), [&](size_t g) { return scales[kLast][g]; },
                         [&](size_t g) { return scales[kLast][kGroups + g]; },
                         [&] { return scales[0][kGroups]; }));
    }
  }

  static constexpr size_t kRunSubBlocks = kRunSlabs * kSubBlocks;

  const CodeTable table_;
  const size_t dst_stride_, rows_;
  float* const scales_;
  uint8_t* const operands_;
  int32_t *sums_, *sums_before_;
  float* const deferred_;
  Pending pending_ = {};
};

template <Kind kKind>
void gemm_amx(const ktk_matmul* mm) {
  const TileRows rows(mm->m, kSubBlock / num_groups(kKind.scaling));
  gemm<GemmAmx<kKind>>(mm);
}

inline void multiply_amx(const ktk_matmul* mm) {
  static constexpr auto kGemm =
      type_table([]<size_t kType> { return &gemm_amx<kind_of(kTypes[kType])>; });
  kGemm[block_type(mm->matrix->format.element)](mm);
}

constexpr auto amx_scratch_size = GemmAmx<kind_of(block_type(kQ8_0))>::scratch_size;

}  // namespace
}  // namespace ktk::llamafile
