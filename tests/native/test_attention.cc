// Attention of one token against float64, with any number of workers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"
#include "moe/engine.h"
#include "step/attention.h"

namespace {

constexpr ktk::Heads kHeads = {.queries = 6, .shared = 2, .depth = 40, .scaling = 0.2f};

std::vector<float> random_floats(size_t count, uint32_t seed) {
  std::vector<float> values(count);
  for (float& value : values) {
    seed = seed * 1664525 + 1013904223;
    value = static_cast<float>(seed >> 8) * 0x1p-23f - 1;
    // bf16 has them all, so that both types are given the same numbers.
    value = std::round(value * 64) / 64;
  }
  return values;
}

std::vector<uint16_t> bf16_of(const std::vector<float>& values) {
  std::vector<uint16_t> bits;
  for (const float value : values) {
    bits.push_back(static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16));
  }
  return bits;
}

// Keys or values with room behind the rows of each head, as a cache has them. Nothing reads there.
constexpr size_t kRoom = 7;
size_t head_stride(size_t tokens) { return (tokens + kRoom) * kHeads.depth; }
std::vector<float> past_of(size_t tokens, uint32_t seed) {
  std::vector<float> values = random_floats(kHeads.shared * head_stride(tokens), seed);
  for (size_t h = 0; h < kHeads.shared; ++h) {
    std::fill_n(
        values.begin() + static_cast<ptrdiff_t>(h * head_stride(tokens) + tokens * kHeads.depth),
        kRoom * kHeads.depth, std::numeric_limits<float>::quiet_NaN());
  }
  return values;
}

std::vector<float> attend(int threads, const std::vector<float>& query, const void* keys,
                          const void* values, ktk_element type, size_t tokens) {
  const auto engine = ktk::Engine::make({.threads = threads, .cpus = {}, .pin = false});
  const auto turn = engine->turn();
  const auto past = [&](const void* data) {
    return ktk::Past{data, type, head_stride(tokens), kHeads.depth};
  };
  std::vector<float> out(kHeads.queries * kHeads.depth);
  ktk::attend(*engine, kHeads, query.data(), past(keys), past(values), tokens, out.data());
  return out;
}

void compare(const std::vector<float>& out, const std::vector<float>& query,
             const std::vector<float>& keys, const std::vector<float>& values, size_t tokens) {
  for (size_t q = 0; q < kHeads.queries; ++q) {
    const size_t head = q / kHeads.together() * head_stride(tokens);
    std::vector<double> scores(tokens);
    double sizes = 0;
    for (size_t t = 0; t < tokens; ++t) {
      double size = 0;
      for (size_t d = 0; d < kHeads.depth; ++d) {
        const double term = static_cast<double>(query[q * kHeads.depth + d]) *
                            static_cast<double>(keys[head + t * kHeads.depth + d]) *
                            static_cast<double>(kHeads.scaling);
        scores[t] += term;
        size += std::abs(term);
      }
      sizes = std::max(sizes, size);
    }
    const double most = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double& score : scores) sum += score = std::exp(score - most);
    for (size_t d = 0; d < kHeads.depth; ++d) {
      double exact = 0;
      for (size_t t = 0; t < tokens; ++t) {
        exact += scores[t] / sum * static_cast<double>(values[head + t * kHeads.depth + d]);
      }
      // A score has a rounding for each product and sum; a mean, whose values are at most 1, has
      // those of a score twice, one for each token, and a few of its own.
      const auto depth = static_cast<double>(kHeads.depth), n = static_cast<double>(tokens);
      const double bound = 2 * ((depth + 2) * sizes + n + 8) * 0x1p-24;
      const auto found = static_cast<double>(out[q * kHeads.depth + d]);
      CHECK(std::abs(found - exact) <= bound);
    }
  }
}

TEST(attention_is_that_of_float64_with_any_number_of_workers) {
  // Around the ends of blocks and of spans.
  for (const size_t tokens : {1, 31, 32, 33, 64, 65, 129, 1100}) {
    const std::vector<float> query = random_floats(kHeads.queries * kHeads.depth, 1);
    const std::vector<float> keys = past_of(tokens, 2), values = past_of(tokens, 3);
    const std::vector<float> out = attend(1, query, keys.data(), values.data(), KTK_F32, tokens);
    compare(out, query, keys, values, tokens);
    const std::vector<uint16_t> short_keys = bf16_of(keys), short_values = bf16_of(values);
    for (const int threads : {1, 2, 3}) {
      CHECK(attend(threads, query, keys.data(), values.data(), KTK_F32, tokens) == out);
      CHECK(attend(threads, query, short_keys.data(), short_values.data(), KTK_BF16, tokens) ==
            out);
    }
  }
}

TEST(a_large_score_takes_all_and_a_nan_is_seen) {
  const size_t tokens = 70;
  std::vector<float> query = random_floats(kHeads.queries * kHeads.depth, 1);
  std::vector<float> keys = past_of(tokens, 2);
  const std::vector<float> values = past_of(tokens, 3);
  // e^0 for one token and 0 for all others.
  for (float& one : query) one = 100 * std::copysign(1.0f, one);
  std::fill_n(keys.begin(), tokens * kHeads.depth, 0.0f);
  for (size_t d = 0; d < kHeads.depth; ++d) keys[66 * kHeads.depth + d] = query[d];
  std::vector<float> out = attend(2, query, keys.data(), values.data(), KTK_F32, tokens);
  for (size_t d = 0; d < kHeads.depth; ++d) CHECK(out[d] == values[66 * kHeads.depth + d]);
  keys[3 * kHeads.depth] = std::numeric_limits<float>::quiet_NaN();
  out = attend(2, query, keys.data(), values.data(), KTK_F32, tokens);
  CHECK(std::isnan(out[0]));
  CHECK(!std::isnan(out[kHeads.together() * kHeads.depth]));  // of another shared head
}

}  // namespace
