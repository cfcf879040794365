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

  explicit TileConfig(uint8_t m, uint8_t depth = 64)
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

inline void enter_amx() { load_tile_config(TileConfig(16)); }
inline void leave_amx() { _tile_release(); }

// The part of a variant (ktk/backend.h) that all with AMX share.
struct AmxVariant {
  static constexpr uint32_t kMStep = 16;  // rows of a tile
  static constexpr auto enter = enter_amx;
  static constexpr auto leave = leave_amx;
};

// Makes tiles as high as the rows of a call, for the time of that call, when they are fewer than
// 16: rows that are only padding would be read from act again for every column. And as deep as it
// wants them.
class TileRows {
 public:
  explicit TileRows(size_t m, uint8_t depth = 64) : changed_(m < 16 || depth != 64) {
    if (changed_) load_tile_config(TileConfig(static_cast<uint8_t>(m < 16 ? m : 16), depth));
  }
  ~TileRows() {
    if (changed_) enter_amx();
  }
  TileRows(const TileRows&) = delete;
  TileRows& operator=(const TileRows&) = delete;

 private:
  bool changed_;
};

}  // namespace
}  // namespace ktk
