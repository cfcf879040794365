#include "moe/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/select.h"

namespace ktk {
namespace {

// Logits of one token, as they are after rounding to the type of `out`.
void multiply(const Router& router, const float* x, const Rows& out, size_t row, Engine* engine,
              float* logits) {
  const ktk_ops& o = ops();
  const auto products = [&](size_t begin, size_t end) {
    for (size_t e = begin; e < end; ++e) {
      logits[e] = o.dot_with(x, router.weight.at(e), router.weight.type, router.k);
    }
  };
  if (engine) {
    const auto workers = static_cast<size_t>(engine->pool.size());
    engine->pool.run([&](int worker) {
      const auto w = static_cast<size_t>(worker);
      products(router.experts * w / workers, router.experts * (w + 1) / workers);
    });
  } else {
    products(0, router.experts);
  }
  if (router.bias) {
    std::vector<float> bias(router.experts);
    o.to_f32(router.bias, router.weight.type, router.experts, bias.data());
    o.add(bias.data(), router.experts, logits);
  }
  o.from_f32(logits, out.type, router.experts, out.at(row));
  o.to_f32(out.at(row), out.type, router.experts, logits);
}

// The largest, in order; insertion is fastest where they are few.
void largest(const float* logits, size_t experts, size_t top_k, int64_t* ids) {
  const auto key = [&](size_t e) {
    return std::isnan(logits[e]) ? std::numeric_limits<float>::infinity() : logits[e];
  };
  size_t count = 0;
  for (size_t e = 0; e < experts; ++e) {
    if (count == top_k && !(key(e) > key(static_cast<size_t>(ids[count - 1])))) continue;
    size_t at = count < top_k ? count++ : count - 1;
    for (; at > 0 && key(e) > key(static_cast<size_t>(ids[at - 1])); --at) ids[at] = ids[at - 1];
    ids[at] = static_cast<int64_t>(e);
  }
}

}  // namespace

void choose_experts(const Router& router, const Rows& x, size_t tokens, size_t top_k,
                    const Rows& logits, const Rows& scores, int64_t* ids, Engine* engine) {
  const ktk_ops& o = ops();
  std::vector<float> input(router.k);
  std::vector<float> values(router.experts), chosen(top_k);
  for (size_t t = 0; t < tokens; ++t, ids += top_k) {
    o.to_f32(x.at(t), x.type, router.k, input.data());
    multiply(router, input.data(), logits, t, engine, values.data());
    largest(values.data(), router.experts, top_k, ids);
    const float most = values[static_cast<size_t>(ids[0])];
    float all = 0;
    for (float& value : values) {
      value = std::exp(value - most);
      all += value;
    }
    float sum = 0;
    for (size_t i = 0; i < top_k; ++i) sum += chosen[i] = values[static_cast<size_t>(ids[i])];
    // A NaN is in `all`, and need not be among the chosen.
    const float scale = router.chosen_only && !std::isnan(all) ? sum : all;
    for (float& one : chosen) one /= scale;
    o.from_f32(chosen.data(), scores.type, top_k, scores.at(t));
  }
}

}  // namespace ktk
