// The loop that workers share.
#pragma once

#include <atomic>
#include <cstddef>

#include "moe/engine.h"
#include "moe/nodes.h"
#include "moe/table.h"

namespace ktk {

// Calls task(i, own) for all i below `count`, on all workers of a pool, which have entered the
// micro-kernels of `variant`; `own` is a worker's own memory of these pieces.
template <typename Task>
void each(Engine& engine, const Variant& variant, const Carver& pieces, size_t count, Task task) {
  std::atomic<size_t> next{0};
  engine.pool.run([&](int worker) {
    char* const own = engine.scratch.own(worker, pieces, node_id(engine.pool.node_of(worker)));
    if (variant.enter) variant.enter();
    for (size_t i = next++; i < count; i = next++) task(i, own);
    if (variant.leave) variant.leave();
  });
}

}  // namespace ktk
