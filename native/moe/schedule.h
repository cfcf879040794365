// How the two halves of a layer are cut into tasks.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/route.h"

namespace ktk {

// Columns [begin, end) of the gate and up projections of route.active[active].
struct GateUpTask {
  uint32_t active, begin, end;
};

// Columns [begin, end) of the layer's output, over all active experts.
struct DownTask {
  uint32_t begin, end;
};

// Cuts the intermediate columns of the active experts into tasks that get shorter towards the end,
// so that `workers` end together; cuts are multiples of `step`. An expert costs the reading of its
// weights plus the arithmetic of its rows.
void cut_gate_up(const Route& route, size_t width, size_t step, int workers,
                 std::vector<GateUpTask>& tasks);

// Cuts the output columns in multiples of `step`, large pieces first and small ones last, so that
// workers end together: every piece reads all encoded intermediates once, so few are better. No
// piece is wider than `cap`, which keeps its f32 sums in the cache.
void cut_down(size_t width, size_t step, size_t cap, int workers, std::vector<DownTask>& tasks);

}  // namespace ktk
