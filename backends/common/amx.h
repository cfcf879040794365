// AMX tile configuration, and a guard for gcc 12's tile intrinsics.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace ktk {
namespace {

// The tiles of a 2 x 2 product: C 0 1 / 2 3, A 4 / 5, B 6 7. All are 64 bytes wide; B has 16 rows.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16];

  // `upper` rows of A and C in tiles 0, 1 and 4, `lower` in 2, 3 and 5.
  TileConfig(uint8_t upper, uint8_t lower)
      : rows{upper, upper, lower, lower, upper, lower, 16, 16} {}
};
static_assert(sizeof(TileConfig) == 64);

// gcc 12 does not know that tile loads read memory: without this barrier it may sink a store past
// the load that needs it.
inline void tile_memory_barrier() { asm volatile("" ::: "memory"); }

inline void load_tile_config(const TileConfig& config) {
  tile_memory_barrier();
  _tile_loadconfig(&config);
}

inline void enter_amx() { load_tile_config({16, 16}); }
inline void leave_amx() { _tile_release(); }

// Tiles as high as the rows of a call that fit in 32, for the time of that call: rows that are only
// padding would be read from act again for every column, and push the weights out of the caches.
class TileRows {
 public:
  explicit TileRows(size_t m) : fewer_(m < 32) {
    const auto rows = static_cast<uint8_t>(m);
    if (fewer_) load_tile_config(m <= 16 ? TileConfig(rows, 16) : TileConfig(16, rows - 16));
  }
  ~TileRows() {
    if (fewer_) load_tile_config({16, 16});
  }
  TileRows(const TileRows&) = delete;
  TileRows& operator=(const TileRows&) = delete;

 private:
  bool fewer_;
};

}  // namespace
}  // namespace ktk
