// AMX tile configuration, and a guard for gcc 12's tile intrinsics.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace ktk {
namespace {

// All tiles are 64 bytes wide. A and C, tiles 0 to 5, have as many rows as are multiplied; B, tiles
// 6 and 7, has 16.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16];

  explicit TileConfig(uint8_t m) : rows{m, m, m, m, m, m, 16, 16} {}
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

// Makes tiles as high as the rows of a call, for the time of that call, when they are fewer than
// 16: rows that are only padding would be read from act again for every column.
class TileRows {
 public:
  explicit TileRows(size_t m) : fewer_(m < 16) {
    if (fewer_) load_tile_config(TileConfig(static_cast<uint8_t>(m)));
  }
  ~TileRows() {
    if (fewer_) enter_amx();
  }
  TileRows(const TileRows&) = delete;
  TileRows& operator=(const TileRows&) = delete;

 private:
  bool fewer_;
};

}  // namespace
}  // namespace ktk
