#include "moe/zero_experts.h"

#include <atomic>
#include <cstring>

#include "moe/carver.h"
#include "moe/nodes.h"
#include "ops/select.h"

namespace ktk {
namespace {

// Calls task(i, first, second) for all i below `count` on the pool's workers, with two rows of f32
// that are a worker's own.
template <typename Task>
void each_with_rows(Engine& engine, size_t width, size_t count, Task task) {
  Carver pieces;
  const size_t first = pieces.add(width, sizeof(float)), second = pieces.add(width, sizeof(float));
  std::atomic<size_t> next{0};
  engine.pool.run([&](int worker) {
    char* const own = engine.scratch.own(worker, pieces, node_id(engine.pool.node_of(worker)));
    for (size_t i = next++; i < count; i = next++) {
      task(i, reinterpret_cast<float*>(own + first), reinterpret_cast<float*>(own + second));
    }
  });
}

}  // namespace

void add_passed(const Route& route, size_t token, const Rows& from, size_t row, size_t column,
                size_t columns, float* scratch, float* sums) {
  const auto passed = route.passed_of(token);
  if (passed.empty()) return;
  ops().to_f32(from.at(row, column), from.type, columns, scratch);
  for (const Route::Passed& one : passed) {
    ops().add_weighted(scratch, nullptr, one.weight, columns, sums);
  }
}

void pass_through(Engine& engine, const Config& config, const Route& route, const Rows& from,
                  const Rows& out, size_t begin, size_t end) {
  const size_t width = config.hidden;
  if (route.passed.empty()) return out.clear(begin, end, width);
  each_with_rows(engine, width, end - begin, [&](size_t token, float* row, float* sums) {
    std::memset(sums, 0, width * sizeof(float));
    add_passed(route, token, from, begin + token, 0, width, row, sums);
    ops().from_f32(sums, out.type, width, out.at(begin + token));
  });
}

void pass_gradients(Engine& engine, const Config& config, const Route& route, const Rows& hidden,
                    const Rows& gradient_of_out, size_t begin, size_t top_k, float* gradients) {
  const size_t width = config.hidden;
  each_with_rows(engine, width, route.passed.size(), [&](size_t i, float* x, float* dy) {
    const Route::Passed& one = route.passed[i];
    const size_t token = begin + one.token;
    ops().to_f32(hidden.at(token), hidden.type, width, x);
    ops().to_f32(gradient_of_out.at(token), gradient_of_out.type, width, dy);
    gradients[token * top_k + one.slot] = ops().dot(x, dy, width);
  });
}

}  // namespace ktk
