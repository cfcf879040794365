#include "moe/cuts.h"

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "core/size.h"

namespace ktk {
namespace {

// Narrower cuts gain nothing: micro-kernels and layouts work on at least as many columns.
constexpr size_t kLeastColumns = 32;
// How much wider one shard may be than another for the sake of a coarser step.
constexpr size_t kMostDifference = 64;

// The least common multiple, or `most` where it is larger: nothing is cut at such steps.
size_t common_step(size_t a, size_t b, size_t most) {
  const size_t times = b / std::gcd(a, b);
  return a > most / times ? most : a * times;
}

struct Cut {
  std::vector<size_t> at;
  size_t widest = 0, narrowest = SIZE_MAX;

  Cut(size_t extent, size_t parts, size_t step) {
    const size_t steps = round_up(extent, step) / step;
    for (size_t i = 0; i <= parts; ++i) at.push_back(std::min(steps * i / parts * step, extent));
    for (size_t i = 0; i < parts; ++i) {
      widest = std::max(widest, at[i + 1] - at[i]);
      narrowest = std::min(narrowest, at[i + 1] - at[i]);
    }
  }
};

}  // namespace

size_t least_step(const CutRules& rules) { return common_multiple(kLeastColumns, rules.block); }

size_t most_shards(size_t extent, const CutRules& rules) {
  const size_t step = least_step(rules);
  return round_up(extent, step) / step;
}

std::vector<size_t> cut_shards(size_t extent, size_t shards, const CutRules& rules) {
  const size_t least = least_step(rules);
  const size_t most = round_up(extent, least);
  size_t step = common_step(least, rules.step, most);
  for (const size_t group : rules.groups) step = common_step(step, group, most);
  Cut finest(extent, shards, least);
  for (; step > least && step % least == 0; step /= 2) {
    Cut cut(extent, shards, step);
    const bool even = cut.narrowest > 0 && cut.widest - cut.narrowest <= kMostDifference;
    if (even && cut.widest == finest.widest) return std::move(cut.at);
  }
  return std::move(finest.at);
}

std::vector<size_t> cut_slices(size_t begin, size_t end, const std::vector<size_t>& groups) {
  std::vector<size_t> at = {begin};
  while (at.back() < end) {
    size_t next = end;
    for (const size_t group : groups) {
      if (at.back() % group) next = std::min(next, round_up(at.back(), group));
    }
    at.push_back(next);
  }
  return at;
}

}  // namespace ktk
