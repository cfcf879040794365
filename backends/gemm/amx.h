// AMX tile configuration, and a guard for gcc 12's tile intrinsics.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace ktk {
namespace {

// A and C, tiles 0 to 5, have as many rows as are multiplied, C and B are 64 bytes wide. `depth`
// bytes of a row of A meet depth / 4 rows of B, tiles 6 and 7.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16];
  uint8_t rows[16];

  TileConfig(uint8_t m, uint8_t depth)
      : column_bytes{64, 64, 64, 64, depth, depth, 64, 64},
        rows{m, m, m, m, m, m, static_cast<uint8_t>(depth / 4), static_cast<uint8_t>(depth / 4)} {}
};
static_assert(sizeof(TileConfig) == 64);

// gcc 12 does not know that tile loads read memory: without this barrier it may sink a store past
// the load that needs it.
inline void tile_memory_barrier() { asm volatile("" ::: "memory"); }

inline void load_tile_config(const TileConfig& config) {
  tile_memory_barrier();
  _tile_loadconfig(&config);
}

template <uint8_t kDepth>
inline void enter_amx() {
  load_tile_config(TileConfig(16, kDepth));
}
inline void leave_amx() { _tile_release(); }

// The part of a variant (ktk/backend.h) that all with AMX share. Tiles are as deep, in bytes, as
// most of its products want them, which then need no configuration of their own.
template <uint8_t kDepth>
struct AmxVariantOfDepth {
  static constexpr uint32_t kMStep = 16;  // rows of a tile
  static constexpr auto enter = enter_amx<kDepth>;
  static constexpr auto leave = leave_amx;
};
using AmxVariant = AmxVariantOfDepth<64>;

// Makes tiles as high as the rows of a call, for the time of that call, when they are fewer than
// 16: rows that are only padding would be read from act again for every column. And as deep as it
// wants them, when that is not the depth of its variant.
template <uint8_t kOfVariant>
class TileRowsOfDepth {
 public:
  explicit TileRowsOfDepth(size_t m, uint8_t depth = kOfVariant)
      : changed_(m < 16 || depth != kOfVariant) {
    if (changed_) load_tile_config(TileConfig(static_cast<uint8_t>(m < 16 ? m : 16), depth));
  }
  ~TileRowsOfDepth() {
    if (changed_) enter_amx<kOfVariant>();
  }
  TileRowsOfDepth(const TileRowsOfDepth&) = delete;
  TileRowsOfDepth& operator=(const TileRowsOfDepth&) = delete;

 private:
  bool changed_;
};
using TileRows = TileRowsOfDepth<64>;

// The 2 x 2 scheme: sums of 32 rows and 32 columns, or of 16 rows.
//
//                          B: two tiles of 16 columns
//                          tmm6            tmm7
//   A: rows 0..15   tmm4   tmm0            tmm1
//      rows 16..31  tmm5   tmm2            tmm3
//
// Four tile loads (64 cache lines) feed four products (64 cycles).
constexpr size_t kAmxRows = 16;  // of a tile
constexpr size_t kAmxTileBytes = 1024;

// The products of the four tiles. The intrinsics take literals only.
struct TilesBf16 {
  static void top_left() { _tile_dpbf16ps(0, 4, 6); }
  static void top_right() { _tile_dpbf16ps(1, 4, 7); }
  static void bottom_left() { _tile_dpbf16ps(2, 5, 6); }
  static void bottom_right() { _tile_dpbf16ps(3, 5, 7); }
};
// Signed by unsigned bytes.
struct TilesInt8 {
  static void top_left() { _tile_dpbsud(0, 4, 6); }
  static void top_right() { _tile_dpbsud(1, 4, 7); }
  static void bottom_left() { _tile_dpbsud(2, 5, 6); }
  static void bottom_right() { _tile_dpbsud(3, 5, 7); }
};

// Signed by signed bytes.
struct TilesSigned {
  static void top_left() { _tile_dpbssd(0, 4, 6); }
  static void top_right() { _tile_dpbssd(1, 4, 7); }
  static void bottom_left() { _tile_dpbssd(2, 5, 6); }
  static void bottom_right() { _tile_dpbssd(3, 5, 7); }
};

template <bool kBothHalves>
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kBothHalves) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// Sums are 4 bytes; `stride` counts them.
template <bool kBothHalves>
inline void load_sums(const void* sums, size_t stride) {
  const char* from = static_cast<const char*>(sums);
  const size_t bytes = stride * 4;
  _tile_loadd(0, from, bytes);
  _tile_loadd(1, from + 64, bytes);
  if constexpr (kBothHalves) {
    _tile_loadd(2, from + kAmxRows * bytes, bytes);
    _tile_loadd(3, from + kAmxRows * bytes + 64, bytes);
  }
}

template <bool kBothHalves>
inline void store_sums(void* sums, size_t stride) {
  char* to = static_cast<char*>(sums);
  const size_t bytes = stride * 4;
  _tile_stored(0, to, bytes);
  _tile_stored(1, to + 64, bytes);
  if constexpr (kBothHalves) {
    _tile_stored(2, to + kAmxRows * bytes, bytes);
    _tile_stored(3, to + kAmxRows * bytes + 64, bytes);
  }
}

// Of one tile of depth.
template <bool kBothHalves>
constexpr size_t kProductsOf = kBothHalves ? 4 : 2;

constexpr auto kNothing = [] {};

// Adds the products of one tile of depth: B tiles at `b` and `b + b_half`, with rows `b_stride`
// bytes apart. Behind each product comes what is to be done `between` them by other units.
//
// A is loaded with the hint that L2 is its place. That is by how often each is used, on any CPU:
// for a run of weights, rows of act pass once, and would drive the weights that all of them meet
// out of L1. Emerald Rapids, 128 rows from L2, one core: 1.08 times the rate in bf16, int8 and
// FP8, 1.18 in MXFP4. No other CPU was measured.
template <class Products, bool kBothHalves, class Between = decltype(kNothing)>
inline void add_tiles(const char* a, size_t a_stride, const char* b, size_t b_half,
                      size_t b_stride = 64, Between between = kNothing) {
  _tile_loadd(6, b, b_stride);
  _tile_stream_loadd(4, a, a_stride);
  Products::top_left();
  between();
  _tile_loadd(7, b + b_half, b_stride);
  Products::top_right();
  between();
  if constexpr (kBothHalves) {
    _tile_stream_loadd(5, a + kAmxRows * a_stride, a_stride);
    Products::bottom_left();
    between();
    Products::bottom_right();
    between();
  }
}

}  // namespace
}  // namespace ktk
