#include "moe/schedule.h"

#include <algorithm>

#include "core/size.h"

namespace ktk {
namespace {

// A task is this part of the work that is left, divided by the workers: long streams of weights at
// first, and at the end tasks so short that workers end together. A stream takes a microsecond to
// get going, so with one token finer tasks cost more than they balance. In the second half a task
// is a stream per expert.
constexpr size_t kGuide = 2, kDownGuide = 1;

// Rows whose arithmetic takes as long as reading one expert's weights: between 30 (int8 dot
// products, fast memory) and several hundred (tiles, slow memory). Only the balance depends on it.
constexpr size_t kRowsPerRead = 100;

// Narrowest piece: below, the streams of weights get too short for the prefetchers.
constexpr size_t kMinColumns = 64;

}  // namespace

void cut_gate_up(const Route& route, size_t width, size_t step, int workers,
                 std::vector<GateUpTask>& tasks) {
  tasks.clear();
  const auto cost = [](const Route::Active& active) { return kRowsPerRead + active.count; };
  size_t left = 0;
  for (const Route::Active& active : route.active) left += cost(active);
  const size_t steps = round_up(width, step) / step;
  const size_t most = std::max<size_t>(steps * step / round_up(kMinColumns, step), 1);
  for (uint32_t i = 0; i < route.active.size(); ++i) {
    const size_t own = cost(route.active[i]);
    const size_t target = std::max<size_t>(left / (kGuide * static_cast<size_t>(workers)), 1);
    const size_t pieces = std::clamp<size_t>((own + target - 1) / target, 1, most);
    left -= own;
    for (size_t p = 0; p < pieces; ++p) {
      const size_t begin = steps * p / pieces * step, end = steps * (p + 1) / pieces * step;
      tasks.push_back(
          {i, static_cast<uint32_t>(begin), static_cast<uint32_t>(std::min(end, width))});
    }
  }
}

void cut_down(size_t width, size_t step, size_t cap, int workers, std::vector<DownTask>& tasks) {
  tasks.clear();
  const size_t least = round_up(kMinColumns, step);
  for (size_t begin = 0; begin < width;) {
    const size_t left = width - begin;
    const size_t share = left / (kDownGuide * static_cast<size_t>(workers));
    const size_t columns = round_up(std::clamp(share, least, std::max(cap, least)), step);
    const size_t end = std::min(begin + columns, width);
    tasks.push_back({static_cast<uint32_t>(begin), static_cast<uint32_t>(end)});
    begin = end;
  }
}

}  // namespace ktk
