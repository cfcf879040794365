// AMX tdpbf16ps: four independent accumulators hide its latency (52 cycles at one per 16).
#include "probe/tiles.h"
#include "probe/unit.h"

namespace {

void run_tiles(size_t iterations) {
  enter_tiles(0x3f203f20);
  for (size_t n = 0; n < iterations; n++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

constexpr ktk_probe_unit kUnits[] = {
    {.name = "amx_bf16",
     .required_isa = KTK_ISA_AVX512 | KTK_ISA_AMX_BF16,
     .ops = 4.0 * 16 * 16 * 32 * 2,
     .run = run_tiles},
};

}  // namespace

extern "C" const ktk_probe_target KTK_PROBE_TARGET;
const ktk_probe_target KTK_PROBE_TARGET = {1, kUnits};
