// The product with AMX, for many rows: 16 x 16 sums, 32 deep, one instruction (gemm/amx.h). For
// types whose scales hold for 32 weights: sums can only leave tiles through memory, and twice as
// often for groups of 16, which vectors multiply in 0.73 to 0.82 of the time with 64 and 128 rows.
//
// B tiles are operands (operands.h) with the sign of the weights; a plane of 128 bytes is a row of
// both B tiles. Two super-blocks are written to scratch, 16 KiB, before all rows pass over them. A
// tile is as deep as a sub-block, because the scales change there. Sums of four sub-blocks rest in
// scratch and are then scaled and added to dst together, which moves dst once for all of them and
// waits once for stores of tiles. Not between the products that follow: while tiles multiply,
// vectors do one operation a cycle instead of two (Intel 6/167), so neither hides behind the other.
//
//   scratch   | scales | operands | sums of four sub-blocks |
#pragma once

#include "gemm/amx.h"
#include "llamafile/epilogue.h"
#include "llamafile/kernel.h"
#include "llamafile/operands.h"

namespace ktk::llamafile {
namespace {

constexpr size_t kAmxMr = 2 * kAmxRows;
constexpr size_t kTileSums = kAmxMr * kNr;
constexpr size_t kAtOnce = 4;  // sub-blocks
static_assert(kSubBlocks % kAtOnce == 0);

template <bool kBothHalves>
inline void multiply_sub_block(const uint8_t* operands, const char* act, size_t act_stride,
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
  static constexpr size_t kSpan = E::kSpan;
  static_assert(E::kGroups == 1 && !defers_d(kScaling) && kAtOnce % kSpan == 0);

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
        operands_(reinterpret_cast<uint8_t*>(scales_ + kRunSubBlocks * num_scales(kScaling))),
        sums_(reinterpret_cast<int32_t*>(operands_ + kRunSubBlocks * kOperandBytes)) {}

  static size_t scratch_size(const ktk_matrix*, size_t) {
    return kRunSubBlocks * (kOperandBytes + num_scales(kScaling) * sizeof(float)) +
           kAtOnce * kTileSums * sizeof(int32_t);
  }

  static size_t passes(size_t) { return 1; }
  void begin_block(const char*, float* dst) const { clear_rows(dst, dst_stride_, rows_); }

  void prepare_run(const Run& run) const {
    for_each_super_block(run, [&](const uint8_t* super_block, size_t count, size_t done) {
      const Header& at = layout_.header_of(count);
      load_scales(type(), at, super_block, count, scales_ + done * num_scales(kScaling));
      write_operands<kKind, 0>(table_, super_block, at, count, operands_ + done * kOperandBytes);
    });
    tile_memory_barrier();
  }

  void tile(const Tile& t) const {
    const size_t count = sub_blocks(t.begin, t.end), first = t.begin * kSubBlocks;
    const size_t bytes = offset(t.end) - offset(t.begin);
    const auto multiply = t.rows > kAmxRows ? multiply_sub_block<true> : multiply_sub_block<false>;
    BulkFetch fetch = t.bulk_fetch;
    for (size_t i = 0; i < count; i += kAtOnce) {
      const size_t end = smaller(i + kAtOnce, count);
      fetch.next(ceil_div((end - i) * bytes, count * kLine));
      for (size_t j = i; j < end; ++j) {
        multiply(operands_ + j * kOperandBytes, act(t, first + j), t.act_stride,
                 sums_ + (j - i) * kTileSums);
      }
      tile_memory_barrier();
      if (end - i == kAtOnce) {
        add<kAtOnce>(t, first, i, kAtOnce);
      } else {
        add<kSpan>(t, first, i, end - i);
      }
      tile_memory_barrier();
    }
  }

 private:
  // Adds to dst the sums of `count` sub-blocks, a multiple of kCount, from number `begin` on.
  template <size_t kCount>
  void add(const Tile& t, size_t first, size_t begin, size_t count) const {
    const char* const act = act_groups(t, first + begin);
    for (size_t n = 0; n < kNr; n += Dot::kLanes) {
      for (size_t i = 0; i < count; i += kCount) {
        add_columns<kCount>(
            sums_ + i * kTileSums + n, scales_ + (begin + i) * num_scales(kScaling) + n,
            act + i * sizeof(ActGroup), t.act_stride, t.rows, t.dst + n, t.dst_stride);
      }
    }
  }

  // The same for a register of n.
  template <size_t kCount>
  static void add_columns(const int32_t* sums, const float* scales_from, const char* act_groups,
                          size_t act_stride, size_t rows, float* dst, size_t dst_stride) {
    Dot::Float scales[kCount][num_scales(kScaling) / kNr];
    for (size_t i = 0; i < kCount; ++i) {
      for (size_t j = 0; j < num_scales(kScaling) / kNr; ++j) {
        scales[i][j] = Dot::load(scales_from + i * num_scales(kScaling) + j * kNr);
      }
    }
    for (size_t r = 0; r < rows; ++r, sums += kNr, act_groups += act_stride, dst += dst_stride) {
      const ActGroup* act = reinterpret_cast<const ActGroup*>(act_groups);
      Dot::Float total = Dot::load(dst);
#pragma GCC unroll 4
      for (size_t span = 0; span < kCount; span += kSpan) {
        Dot::Float t = Dot::set1(0);
#pragma GCC unroll 2
        for (size_t i = span; i < span + kSpan; ++i) {
          t = E::add_group(
              i == span, t, act[i],
              [&](size_t) { return Dot::convert(Dot::load_bytes(sums + i * kTileSums)); },
              [&](size_t) { return scales[i][0]; }, [&](size_t) { return scales[i][1]; });
        }
        const size_t last = span + kSpan - 1;
        total = E::finish(
            t, act[last], total, [&](size_t) { return scales[last][0]; },
            [&](size_t) { return scales[last][1]; }, [&] { return scales[span][1]; });
      }
      Dot::store(dst, total);
    }
  }

  static constexpr size_t kRunSubBlocks = kRunSlabs * kSubBlocks;

  const CodeTable table_;
  const size_t dst_stride_, rows_;
  float* const scales_;
  uint8_t* const operands_;
  int32_t* const sums_;
};

template <Kind kKind>
void gemm_amx(const ktk_matmul* mm) {
  const TileRowsOfDepth<kSubBlock> rows(mm->m);
  gemm<GemmAmx<kKind>>(mm);
}

}  // namespace
}  // namespace ktk::llamafile
