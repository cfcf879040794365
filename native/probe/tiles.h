// AMX units: four accumulator tiles of 16 x 16, two tiles each of the operands.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace {

struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t colsb[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// Tiles 0-3 zero, 4-7 full of `pattern`.
inline void enter_tiles(uint32_t pattern) {
  alignas(64) const TileConfig config;
  alignas(64) uint32_t tile[256];
  for (uint32_t& element : tile) element = pattern;
  // The compiler does not see that loading a tile reads memory.
  asm volatile("" : : "r"(&config), "r"(tile) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, tile, 64);
  _tile_loadd(5, tile, 64);
  _tile_loadd(6, tile, 64);
  _tile_loadd(7, tile, 64);
}

}  // namespace
