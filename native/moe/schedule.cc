#include "moe/schedule.h"

#include <algorithm>

namespace ktk {
namespace {

// Tasks per worker in the first half. The last one to end is waited for by all, on average half a
// task: 1 / 128 of the time.
constexpr size_t kTasksPerWorker = 64;

// Rows whose arithmetic takes as long as reading one expert's weights: between 30 (int8 dot
// products, fast memory) and several hundred (tiles, slow memory). Only the balance depends on it.
constexpr size_t kRowsPerRead = 100;

// Narrowest piece of the output: below, the streams get too short for the prefetchers.
constexpr size_t kMinColumns = 64;

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

}  // namespace

void cut_gate_up(const Route& route, size_t width, size_t step, int workers,
                 std::vector<GateUpTask>& tasks) {
  tasks.clear();
  const auto cost = [](const Route::Active& active) { return kRowsPerRead + active.count; };
  size_t total = 0;
  for (const Route::Active& active : route.active) total += cost(active);
  const size_t steps = round_up(width, step) / step;
  const size_t wanted = kTasksPerWorker * static_cast<size_t>(workers);
  for (uint32_t i = 0; i < route.active.size(); ++i) {
    const size_t share = (cost(route.active[i]) * wanted + total - 1) / total;
    const size_t pieces = std::clamp<size_t>(share, 1, steps);
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
    const size_t share = left / (2 * static_cast<size_t>(workers));
    const size_t columns = round_up(std::clamp(share, least, std::max(cap, least)), step);
    const size_t end = std::min(begin + columns, width);
    tasks.push_back({static_cast<uint32_t>(begin), static_cast<uint32_t>(end)});
    begin = end;
  }
}

}  // namespace ktk
