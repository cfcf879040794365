// The product of f32 rows with blocks that are computed as floats (blocks.h). A run, 128 of k, is
// decoded to f32 in L1, which all tiles of rows then multiply: those of F32 (kernel.h), so that the
// product has the bits of one with the values that blocks stand for.
//
// Each n has a lane, so nothing moves between lanes. Instructions for a register of values, with
// which it is stored but without the FMA of each row:
//
//              512 bits     avx_vnni     avx2
//   IQ*_KT     7            7            8        multiply, mask, add bytes up, convert, scale
//   IQ3_KT     10           11           12       and the sign
//   IQ6_K      9            9            9        shift, mask, convert, three FMA, shift, scale
//
// and one load for every seed, or five codes.
#pragma once

#include "llamafile/dot.h"
#include "llamafile/floats/blocks_codec.h"
#include "llamafile/floats/kernel.h"

namespace ktk::llamafile::floats {
namespace {

// Writes 32 n x 32 of k: sub-block number `index` of a super-block.
template <ktk_element kElement>
class SubBlock {
  static constexpr FloatBlock kType = float_block(kElement);
  using Int = Dot::Int;
  using Float = Dot::Float;

 public:
  static void decode(const uint8_t* super_block, size_t index, float* out) {
    const uint8_t* from = super_block + sub_blocks_at(kType) + index * coded_sub_block_bytes(kType);
    constexpr size_t kGroups = kSubBlock / kType.group;
    for (size_t g = 0; g < kGroups; ++g) {
      for (size_t n = 0; n < kNr; n += Dot::kLanes) {
        const size_t group = index * kGroups + g;
        const uint8_t* sub = super_block + sub_at(kType) + group * kNr + n;
        const Float scale = Dot::mul(load_d(super_block + n * kType.d_bytes), Dot::load_i8(sub));
        float* to = out + g * kType.group * kNr + n;
        if constexpr (kType.of_seed) {
          decode_seeds(from + n * 2, from + 2 * kNr + n, scale, to);
        } else {
          const uint8_t* shifted = super_block + shift_at(kType) + group * kShiftBytes + n / 8;
          decode_codes(from + g * kDwordsOfGroup * kPlaneBytes + 4 * n, shifted, scale, to);
        }
      }
    }
  }

 private:
  static Float load_d(const uint8_t* d) {
    if constexpr (kType.d_bytes == 4) return Dot::load(reinterpret_cast<const float*>(d));
    return Dot::load_f16(reinterpret_cast<const uint16_t*>(d));
  }

  static void decode_seeds(const uint8_t* seeds, const uint8_t* signs, Float scale, float* to) {
    constexpr size_t kOfSeed = kType.of_seed;
    const Int factor = Dot::set1_int(static_cast<int32_t>(kSeedFactor));
    for (size_t i = 0; i < kSubBlock / kOfSeed; ++i, to += kOfSeed * kNr) {
      const size_t at = i * seed_bytes(kType);
      Int number = Dot::add(Dot::load_u16_int(seeds + at), Dot::set1_int(kSeedOffset));
      Int negative{};
      if constexpr (kType.has_signs) negative = Dot::load_u8_int(signs + at);
      unroll<kOfSeed>([&]<size_t kAt>() __attribute__((always_inline)) {
        number = Dot::multiply_int(number, factor);
        const Int bytes = Dot::bit_and(number, Dot::set1_int(kSeedMask));
        Float entry = Dot::convert(Dot::sum_of_bytes<-kMean>(bytes));
        if constexpr (kType.has_signs) {
          entry = Dot::with_sign(entry, Dot::template shift_left_int<31 - kAt>(negative));
        }
        Dot::store(to + kAt * kNr, Dot::mul(scale, entry));
      });
    }
  }

  static void decode_codes(const uint8_t* dwords, const uint8_t* shifted, Float scale, float* to) {
    const Int one = Dot::set1_int(__builtin_bit_cast(int32_t, 1.f));
    const Float shift = Dot::as_float(Dot::keep_where(shifted, one));
    const Int mask = Dot::set1_int(63);
    Int last = Dot::set1_int(0);
    const auto write = [&](Int code, float* at) __attribute__((always_inline)) {
      const Float x = Dot::convert(code);
      Float entry = Dot::fma(x, Dot::set1(kCubic[3]), Dot::set1(kCubic[2]));
      entry = Dot::fma(x, entry, Dot::set1(kCubic[1]));
      entry = Dot::fma(x, entry, Dot::set1(kCubic[0]));
      Dot::store(at, Dot::mul(scale, Dot::add(entry, shift)));
    };
    unroll<kDwordsOfGroup>([&]<size_t kDword>() __attribute__((always_inline)) {
      const Int codes = Dot::load_bytes(dwords + kDword * kPlaneBytes);
      unroll<5>([&]<size_t kAt>() __attribute__((always_inline)) {
        const Int code = Dot::bit_and(Dot::template shift_right_int<6 * kAt>(codes), mask);
        write(code, to + (5 * kDword + kAt) * kNr);
      });
      const Int two = Dot::template shift_right_int<30>(codes);
      last = Dot::bit_or(last, Dot::template shift_left_int<2 * kDword>(two));
    });
    write(last, to + 15 * kNr);
  }
};

template <ktk_element kElement>
class BlocksKernel {
  static constexpr FloatBlock kType = float_block(kElement);
  static constexpr size_t kBytes = coded_sub_block_bytes(kType);
  using Tiles = Kernel<Dot, KTK_F32, false>;

 public:
  static constexpr size_t kMr = Tiles::kMr;
  static constexpr size_t kNr = Tiles::kNr;
  static constexpr size_t kLineProducts = kSubBlock * kNr * sizeof(float) / kBytes;
  static constexpr size_t kRunSlabs = 4;  // sub-blocks: 16 KiB of f32

  explicit BlocksKernel(const ktk_matmul* mm)
      : sub_blocks_(mm->matrix->k / kSubBlock), decoded_(static_cast<float*>(mm->scratch)) {}
  static size_t scratch_size(const ktk_matrix*, size_t) {
    return kRunSlabs * kSubBlock * kNr * sizeof(float);
  }

  size_t slabs() const { return sub_blocks_; }
  // Super-blocks begin with their headers.
  static size_t offset(size_t slab) {
    const size_t header = slab % kSubBlocks ? sub_blocks_at(kType) : 0;
    return slab / kSubBlocks * coded_super_block_bytes(kType) + header + slab % kSubBlocks * kBytes;
  }
  static constexpr size_t passes(size_t rows) { return Tiles::passes(rows); }

  void begin_run(const Run& run, Fetch fetch) const {
    float* to = decoded_;
    for (size_t slab = run.begin; slab < run.end; ++slab, to += kSubBlock * kNr) {
      for (size_t at = offset(slab); at < offset(slab + 1); at += kLine) fetch.next();
      const char* super_block = run.block + offset(slab / kSubBlocks * kSubBlocks);
      SubBlock<kElement>::decode(reinterpret_cast<const uint8_t*>(super_block), slab % kSubBlocks,
                                 to);
    }
  }
  void tile(const Tile& t) const {
    Tiles::multiply(t, reinterpret_cast<const char*>(decoded_), t.begin * kSubBlock,
                    (t.end - t.begin) * kSubBlock);
  }

 private:
  const size_t sub_blocks_;
  float* const decoded_;
};

// One function for each type.
struct BlocksProduct {
  ktk_element element;
  RunProduct* run;
};
constexpr BlocksProduct kBlocksProducts[] = {
    {kIQ6_K, gemm<BlocksKernel<kIQ6_K>>},   {kIQ1_KT, gemm<BlocksKernel<kIQ1_KT>>},
    {kIQ2_KT, gemm<BlocksKernel<kIQ2_KT>>}, {kIQ3_KT, gemm<BlocksKernel<kIQ3_KT>>},
    {kIQ4_KT, gemm<BlocksKernel<kIQ4_KT>>},
};
inline void multiply_blocks(const ktk_matmul* mm) {
  for (const BlocksProduct& one : kBlocksProducts) {
    if (one.element == mm->matrix->format.element) return one.run(mm);
  }
}
inline size_t blocks_scratch_size(const ktk_matrix* matrix, size_t m) {
  return BlocksKernel<kIQ6_K>::scratch_size(matrix, m);  // the same for all
}

struct BlocksWeight {
  static constexpr const char* kLayout = llamafile::kLayout;
  static constexpr uint32_t kNStep = kNr;
  static constexpr auto size = coded_weight_size;
  static constexpr auto pack = pack_coded_weight;
  static constexpr auto unpack = unpack_coded_weight;
  static constexpr auto offset = coded_weight_offset;
};

// A variant for these types alone.
struct BlocksVariant {
  using Weight = BlocksWeight;
  using Act = ActRowsF32<kSubBlock>;
  static constexpr ktk_ukernel kUkernels[] = {
      ukernel("gemm_f32_decoded", multiply_blocks, blocks_scratch_size)};
};

}  // namespace
}  // namespace ktk::llamafile::floats
