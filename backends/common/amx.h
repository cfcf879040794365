// AMX tile configuration, and a guard for gcc 12's tile intrinsics.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace ktk {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// gcc 12 does not know that tile loads read memory: without this barrier it may sink a store past
// the load that needs it.
inline void tile_memory_barrier() { asm volatile("" ::: "memory"); }

// Makes all eight tiles 16 rows of 64 bytes, for the calling thread.
inline void enter_amx() {
  const TileConfig config;
  tile_memory_barrier();
  _tile_loadconfig(&config);
}

inline void leave_amx() { _tile_release(); }

}  // namespace
}  // namespace ktk
