// AMX tdpbsud: four independent accumulators hide its latency (52 cycles at one per 16).
#include "probe/tiles.h"
#include "probe/unit.h"

namespace {

void run_tiles(size_t iterations) {
  enter_tiles(0x5d5d5d5d);
  for (size_t n = 0; n < iterations; n++) {
    _tile_dpbsud(0, 4, 6);
    _tile_dpbsud(1, 4, 7);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
  _tile_release();
}

constexpr ktk_probe_unit kUnits[] = {
    {.name = "amx_int8",
     .act_bits = 8,
     .weight_bits = 8,
     .required_isa = KTK_ISA_AVX512 | KTK_ISA_AMX_INT8,
     .ops = 4.0 * 16 * 16 * 64 * 2,
     .run = run_tiles},
};

}  // namespace

extern "C" const ktk_probe_target KTK_PROBE_TARGET;
const ktk_probe_target KTK_PROBE_TARGET = {1, kUnits};
