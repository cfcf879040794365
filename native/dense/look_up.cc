// Rows of a packed weight, each decoded by itself.
#include <atomic>

#include "core/floats.h"
#include "dense/pipeline.h"
#include "moe/nodes.h"
#include "ops/select.h"

namespace ktk {
namespace {

// Waking workers takes as long as decoding a few rows.
constexpr size_t kFewRows = 8;

}  // namespace

void look_up(Engine& engine, const Variant& variant, const DenseWeights& weights,
             std::span<const int64_t> ids, const Rows& out) {
  const size_t k = weights.k();
  Carver pieces;
  const size_t values_at = pieces.add(k, sizeof(float));
  std::atomic<size_t> next{0};
  const auto body = [&](int worker) {
    const int node = node_id(engine.pool.node_of(worker));
    float* const values =
        reinterpret_cast<float*>(engine.scratch.own(worker, pieces, node) + values_at);
    for (size_t i = next.fetch_add(1); i < ids.size(); i = next.fetch_add(1)) {
      const size_t row = static_cast<size_t>(ids[i]);
      const DenseSlice& slice = weights.slice_of(row);
      const size_t first = row - slice.begin;
      variant.unpack_weight(&slice.matrix, slice.packed, first, first + 1, values, k);
      if (slice.factor != 1) ops().scale(slice.factor, 1, k, values, k);
      restore_columns(weights.order_of(slice), 1, values, k);
      ops().from_f32(values, out.type, k, out.at(i));
    }
  };
  if (ids.size() <= kFewRows) {
    const DefaultFloats floats;
    body(0);
  } else {
    engine.pool.run(body);
  }
}

}  // namespace ktk
