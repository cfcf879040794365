// Activation functions against float64, their derivatives against finite differences, and the
// products of float matrices, with every instruction set that this CPU has.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "ops/ops.h"
#include "ops/select.h"

namespace {

constexpr double kUnit = 0x1p-24;

// Runs `body` once for each instruction set that has operations of its own.
template <typename Body>
void with_each_isa(Body body) {
#if defined(__x86_64__)
  const char* const given = std::getenv("KTK_ISA");
  const std::string before = given ? given : "";
  for (const char* isa : {"avx2", "avx512"}) {
    setenv("KTK_ISA", isa, 1);
    body();
  }
  before.empty() ? unsetenv("KTK_ISA") : setenv("KTK_ISA", before.c_str(), 1);
#else
  body();
#endif
}

std::vector<float> random_floats(size_t count, float scale, uint32_t seed) {
  std::vector<float> values(count);
  for (float& value : values) {
    seed = seed * 1664525 + 1013904223;
    value = scale * (static_cast<float>(seed >> 8) * 0x1p-23f - 1);
  }
  return values;
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The function of gate, in float64.
double of_gate(const ktk_glu& glu, double g) {
  const double cap = static_cast<double>(glu.gate_softcap);
  switch (glu.kind) {
    case KTK_SWIGLUOAI:
      return g * sigmoid(static_cast<double>(glu.alpha) * g);
    case KTK_GELU_TANH:
      return g * sigmoid(2 * std::sqrt(2 / std::acos(-1.0)) * (g + 0.044715 * g * g * g));
    case KTK_GELU:
      return g * std::erfc(-g / std::sqrt(2.0)) / 2;
    case KTK_RELU:
      return std::max(g, 0.0);
    case KTK_RELU2:
      return std::max(g, 0.0) * std::max(g, 0.0);
    case KTK_SITU:
      return cap * std::tanh(g / cap) * sigmoid(g);
    default:
      return g * sigmoid(g);
  }
}

double of_up(const ktk_glu& glu, double u) {
  const double cap = static_cast<double>(glu.up_softcap);
  if (glu.kind == KTK_SITU && std::isfinite(cap)) return cap * std::tanh(u / cap);
  return glu.kind == KTK_SWIGLUOAI ? u + 1 : u;
}

double clamped(const ktk_glu& glu, double g) {
  const double limit = static_cast<double>(glu.limit);
  g = std::min(g, limit);
  return glu.clamp_gate_below ? std::max(g, -limit) : g;
}

double result(const ktk_glu& glu, double g, double u) {
  const double limit = static_cast<double>(glu.limit);
  const bool after = glu.kind == KTK_SWIGLUSTEP;
  g = after ? clamped(glu, of_gate(glu, g)) : of_gate(glu, clamped(glu, g));
  return g * of_up(glu, std::clamp(u, -limit, limit));
}

struct Derivatives {
  double g, u;
};

Derivatives differences(const ktk_glu& glu, double g, double u) {
  constexpr double kStep = 1e-5;
  return {(result(glu, g + kStep, u) - result(glu, g - kStep, u)) / (2 * kStep),
          (result(glu, g, u + kStep) - result(glu, g, u - kStep)) / (2 * kStep)};
}

// What f32 may lose. exp is off by 8 units and by 8 roundings of its argument, which is |g| to its
// cube; the rest by 40 roundings of terms that are no larger than 2 + |g|; the difference by its
// cubic term, of which 1e-9 is more than any of these functions has.
double allowed(const ktk_glu& glu, double g, double size, double u) {
  const bool cubic = glu.kind == KTK_GELU_TANH || glu.kind == KTK_GELU;
  // Where the argument is large, what exp multiplies has vanished.
  const double z = std::min(cubic ? 3 * g * g : 2 * std::abs(g), 40.0);
  return ((40 + 16 * z) * kUnit * (2 + std::abs(g)) + 1e-9) * size * (std::abs(u) + 1);
}

std::vector<ktk_glu> all_activations() {
  std::vector<ktk_glu> all;
  const float inf = std::numeric_limits<float>::infinity();
  for (const auto& one : kActivations) {
    for (const float limit : {inf, 2.0f}) {
      for (const bool below : {false, true}) {
        all.push_back({one.kind, 1.702f, limit, below, 7, 3});
        if (one.kind == KTK_SITU) all.push_back({one.kind, 1.702f, limit, below, 7, inf});
      }
    }
  }
  return all;
}

TEST(glu_backward_is_the_derivative_of_glu) {
  constexpr size_t kRows = 3, kColumns = 197, kStride = 208;
  const std::vector<float> gate_bias = random_floats(kColumns, 1, 5);
  const std::vector<float> up_bias = random_floats(kColumns, 1, 6);
  with_each_isa([&] {
    for (const ktk_glu& glu : all_activations()) {
      for (const bool biased : {false, true}) {
        const float* const gb = biased ? gate_bias.data() : nullptr;
        const float* const ub = biased ? up_bias.data() : nullptr;
        const std::vector<float> g = random_floats(kRows * kStride, 9, 1);
        const std::vector<float> u = random_floats(kRows * kStride, 4, 2);
        const std::vector<float> dh = random_floats(kRows * kStride, 1, 3);
        const float weights[kRows] = {0.5f, -1.25f, 0};
        std::vector<float> gate = g, up = u, h(kRows * kStride), forward = g, lost = u;
        float dots[kRows] = {1, 2, 3};
        ktk::ops().glu_backward(&glu, kRows, kColumns, gate.data(), up.data(), dh.data(), h.data(),
                                kStride, gb, ub, weights, dots);
        ktk::ops().glu(&glu, kRows, kColumns, forward.data(), lost.data(), kStride, gb, ub);
        for (size_t row = 0; row < kRows; ++row) {
          double dot = static_cast<double>(row) + 1, size = dot;
          for (size_t i = 0; i < kColumns; ++i) {
            const size_t here = row * kStride + i;
            CHECK_EQ(h[here], forward[here]);
            const float gi = g[here] + (gb ? gb[i] : 0), ui = u[here] + (ub ? ub[i] : 0);
            const double d = static_cast<double>(dh[here]), limit = static_cast<double>(glu.limit);
            const Derivatives want =
                differences(glu, static_cast<double>(gi), static_cast<double>(ui));
            const double weighted = std::abs(static_cast<double>(weights[row]) * d);
            // A difference across the edge of a clamp is none.
            const double held = glu.kind == KTK_SWIGLUSTEP ? of_gate(glu, static_cast<double>(gi))
                                                           : static_cast<double>(gi);
            const double from_edge =
                std::min({std::abs(std::abs(held) - limit), std::abs(static_cast<double>(gi)),
                          std::abs(std::abs(static_cast<double>(ui)) - limit)});
            if (from_edge > 1e-4) {
              const double factor = static_cast<double>(weights[row]) * d;
              const double at = glu.kind == KTK_SWIGLUSTEP ? static_cast<double>(gi)
                                                           : clamped(glu, static_cast<double>(gi));
              const double bound = allowed(glu, at, weighted, static_cast<double>(ui));
              const double wanted = result(glu, static_cast<double>(gi), static_cast<double>(ui));
              CHECK(std::abs(static_cast<double>(h[here]) - wanted) <=
                    allowed(glu, at, 1, static_cast<double>(ui)) * (1 + std::abs(at)));
              CHECK(std::abs(static_cast<double>(gate[here]) - factor * want.g) <= bound);
              CHECK(std::abs(static_cast<double>(up[here]) - factor * want.u) <=
                    bound * (1 + std::abs(at)));
            }
            dot += d * static_cast<double>(h[here]);
            size += std::abs(d * static_cast<double>(h[here]));
          }
          CHECK(std::abs(static_cast<double>(dots[row]) - dot) <= (kColumns + 20) * kUnit * size);
        }
      }
    }
  });
}

TEST(without_a_gate_up_has_the_function_of_gate) {
  constexpr size_t kColumns = 197;
  const std::vector<float> z = random_floats(kColumns, 9, 1), bias = random_floats(kColumns, 1, 5);
  const std::vector<float> dh = random_floats(kColumns, 1, 3);
  const float weight = -1.25f;
  with_each_isa([&] {
    for (const ktk_glu& glu : all_activations()) {
      std::vector<float> up = z, slope = z, h(kColumns);
      float dot = 0;
      ktk::ops().glu(&glu, 1, kColumns, nullptr, up.data(), kColumns, nullptr, bias.data());
      ktk::ops().glu_backward(&glu, 1, kColumns, nullptr, slope.data(), dh.data(), h.data(),
                              kColumns, nullptr, bias.data(), &weight, &dot);
      for (size_t i = 0; i < kColumns; ++i) {
        const double x = static_cast<double>(z[i] + bias[i]);
        const bool after = glu.kind == KTK_SWIGLUSTEP;
        const double want = after ? clamped(glu, of_gate(glu, x)) : of_gate(glu, clamped(glu, x));
        CHECK(std::abs(static_cast<double>(up[i]) - want) <=
              allowed(glu, x, 1, 0) * (1 + std::abs(x)));
        CHECK_EQ(h[i], up[i]);
      }
      // With a cap on up, no up is 1 after its function.
      if (glu.kind == KTK_SITU && std::isfinite(glu.up_softcap)) continue;
      // A gate beside an up of 1 is the same, in every bit.
      std::vector<float> gate = z, one(kColumns, glu.kind == KTK_SWIGLUOAI ? 0.0f : 1.0f);
      std::vector<float> same(kColumns);
      float other = 0;
      ktk::ops().glu_backward(&glu, 1, kColumns, gate.data(), one.data(), dh.data(), same.data(),
                              kColumns, bias.data(), nullptr, &weight, &other);
      CHECK(same == h);
      CHECK(gate == slope);
      CHECK_EQ(other, dot);
    }
  });
}

TEST(glu_backward_far_out_is_finite_and_keeps_nan) {
  with_each_isa([&] {
    for (const ktk_glu& glu : all_activations()) {
      const float nan = std::numeric_limits<float>::quiet_NaN();
      const std::vector<float> far = {3e38f, -3e38f, 1e20f, -1e20f, 88, -88, 0, nan};
      std::vector<float> gate = far, up(far.size(), 1), dh(far.size(), 1), h(far.size());
      const float weight = 1;
      float dot = 0;
      ktk::ops().glu_backward(&glu, 1, far.size(), gate.data(), up.data(), dh.data(), h.data(),
                              far.size(), nullptr, nullptr, &weight, &dot);
      for (size_t i = 0; i + 1 < far.size(); ++i) {
        // The derivatives of g^2 * u themselves leave the range of f32.
        if (glu.kind == KTK_RELU2 && std::abs(far[i]) > 1e18f) continue;
        CHECK(std::isfinite(gate[i]));
        CHECK(std::isfinite(up[i]));
      }
      CHECK(std::isnan(gate.back()));
    }
  });
}

TEST(dot_with_has_the_bits_of_dot) {
  with_each_isa([&] {
    const ktk_ops& o = ktk::ops();
    for (const size_t n : {1, 15, 16, 17, 64, 100, 2048}) {
      const std::vector<float> a = random_floats(n, 1, 1), b = random_floats(n, 3, 2);
      for (const ktk_element type : {KTK_F32, KTK_F16, KTK_BF16}) {
        std::vector<float> stored(n), exact(n);
        o.from_f32(b.data(), type, n, stored.data());
        o.to_f32(stored.data(), type, n, exact.data());
        CHECK_EQ(o.dot_with(a.data(), stored.data(), type, n), o.dot(a.data(), exact.data(), n));
      }
    }
  });
}

TEST(exponentials_are_those_below_the_largest_and_their_sum) {
  with_each_isa([&] {
    const ktk_ops& o = ktk::ops();
    for (const size_t n : {1, 16, 33, 100}) {
      const std::vector<float> x = random_floats(n, 40, 3);
      std::vector<float> found = x;
      const float most = *std::max_element(x.begin(), x.end());
      const double sum = static_cast<double>(o.exponentials(most, n, found.data()));
      double all = 0;
      for (size_t i = 0; i < n; ++i) {
        const double wanted = std::exp(static_cast<double>(x[i] - most));
        // 1e-7 of exp_clamped, and a unit of the result.
        CHECK(std::abs(static_cast<double>(found[i]) - wanted) <= (1e-7 + 2 * kUnit) * wanted);
        all += static_cast<double>(found[i]);
      }
      CHECK(std::abs(sum - all) <= static_cast<double>(n) * kUnit * all);
    }
    std::vector<float> odd = {0, NAN, -INFINITY, -200};
    CHECK(std::isnan(o.exponentials(0, odd.size(), odd.data())));
    CHECK_EQ(odd[0], 1.0f);
    CHECK(std::isnan(odd[1]));
    CHECK(odd[2] < 1e-37f && odd[3] < 1e-37f);
  });
}

TEST(gemm_adds_products_in_one_order) {
  constexpr struct {
    size_t m, n, k;
  } kSizes[] = {{1, 1, 1},   {13, 16, 300}, {7, 45, 3},  {25, 32, 513},
                {12, 71, 9}, {2, 8, 256},   {31, 100, 0}};
  with_each_isa([&] {
    const auto gemm = ktk::products().gemm;
    for (const auto& [m, n, k] : kSizes) {
      for (const bool transposed : {false, true}) {
        const size_t a_row = transposed ? 1 : k + 3, a_column = transposed ? m + 2 : 1;
        const std::vector<float> a = random_floats((m + 3) * (k + 3), 1, 1);
        const std::vector<float> b = random_floats(k * (n + 5) + 1, 1, 2);
        const std::vector<float> before = random_floats(m * (n + 1), 1, 3);
        std::vector<float> whole = before, parts = before;
        gemm(m, n, k, a.data(), a_row, a_column, b.data(), n + 5, whole.data(), n + 1);
        for (size_t i = 0; i < m; ++i) {
          for (size_t j = 0; j <= n; ++j) {
            const size_t at = i * (n + 1) + j;
            if (j == n) {
              CHECK_EQ(whole[at], before[at]);  // beside the matrix
              continue;
            }
            double sum = static_cast<double>(before[at]), size = std::abs(sum);
            for (size_t l = 0; l < k; ++l) {
              const double one = static_cast<double>(a[i * a_row + l * a_column]) *
                                 static_cast<double>(b[l * (n + 5) + j]);
              sum += one;
              size += std::abs(one);
            }
            const double bound = static_cast<double>(k + 1) * kUnit * size * 1.001;
            CHECK(std::abs(static_cast<double>(whole[at]) - sum) <= bound);
          }
        }
        const size_t m0 = m / 3, n0 = n / 2, k0 = k / 2;
        for (const auto& [i, i_end] : {std::pair{size_t{0}, m0}, std::pair{m0, m}}) {
          for (const auto& [j, j_end] : {std::pair{size_t{0}, n0}, std::pair{n0, n}}) {
            for (const auto& [l, l_end] : {std::pair{size_t{0}, k0}, std::pair{k0, k}}) {
              gemm(i_end - i, j_end - j, l_end - l, a.data() + i * a_row + l * a_column, a_row,
                   a_column, b.data() + l * (n + 5) + j, n + 5, parts.data() + i * (n + 1) + j,
                   n + 1);
            }
          }
        }
        CHECK(std::memcmp(whole.data(), parts.data(), whole.size() * sizeof(float)) == 0);
        if (k == 0) continue;
        std::vector<float> zeros = before, unread(before.size(), std::nanf(""));
        for (size_t i = 0; i < m; ++i) {
          std::fill_n(&zeros[i * (n + 1)], n, 0.0f);
          unread[i * (n + 1) + n] = before[i * (n + 1) + n];
        }
        gemm(m, n, k, a.data(), a_row, a_column, b.data(), n + 5, zeros.data(), n + 1);
        ktk::products().gemm_of_zeros(m, n, k, a.data(), a_row, a_column, b.data(), n + 5,
                                      unread.data(), n + 1);
        CHECK(std::memcmp(zeros.data(), unread.data(), zeros.size() * sizeof(float)) == 0);
      }
    }
  });
}

TEST(transpose_moves) {
  with_each_isa([&] {
    for (const auto& [rows, columns] :
         {std::pair{size_t{16}, size_t{16}}, std::pair{size_t{37}, size_t{53}}}) {
      const std::vector<float> src = random_floats(rows * (columns + 3), 1, 7);
      std::vector<float> turned(columns * (rows + 1));
      ktk::products().transpose(rows, columns, src.data(), columns + 3, turned.data(), rows + 1);
      for (size_t r = 0; r < rows; ++r) {
        for (size_t c = 0; c < columns; ++c) {
          CHECK_EQ(turned[c * (rows + 1) + r], src[r * (columns + 3) + c]);
        }
      }
    }
  });
}

TEST(pairs_are_rounded_and_filled_up_with_zeros) {
  constexpr struct {
    size_t depth, columns;
  } kSizes[] = {{64, 64}, {1, 1}, {37, 53}, {70, 40}, {32, 16}};
  with_each_isa([&] {
    for (const auto& [depth, columns] : kSizes) {
      std::vector<float> src = random_floats(depth * (columns + 3), 1, 7);
      src[0] = NAN;
      std::vector<uint16_t> rounded(src.size());
      ktk::ops().from_f32(src.data(), KTK_BF16, src.size(), rounded.data());
      const size_t steps = (depth + KTK_PAIR_DEPTH - 1) / KTK_PAIR_DEPTH;
      const size_t blocks = (columns + KTK_PAIR_COLUMNS - 1) / KTK_PAIR_COLUMNS;
      // Blocks with room between them, where nothing may be written.
      const size_t block_bytes = (steps + 1) * KTK_PAIR_STEP_BYTES;
      constexpr uint16_t kBefore = 0x5555;
      std::vector<uint16_t> packed(blocks * block_bytes / sizeof(uint16_t), kBefore);
      ktk::products().pack_pairs(depth, columns, src.data(), columns + 3,
                                 reinterpret_cast<char*>(packed.data()), block_bytes);
      for (size_t c = 0; c < blocks * KTK_PAIR_COLUMNS; ++c) {
        for (size_t k = 0; k < (steps + 1) * KTK_PAIR_DEPTH; ++k) {
          // The layout's picture, in elements.
          const size_t at = c / 32 * (block_bytes / 2) + k / 32 * 1024 + c % 32 / 16 * 512 +
                            k % 32 / 2 * 32 + c % 16 * 2 + k % 2;
          const uint16_t expected = k >= steps * KTK_PAIR_DEPTH ? kBefore
                                    : k < depth && c < columns  ? rounded[k * (columns + 3) + c]
                                                                : 0;
          CHECK_EQ(packed[at], expected);
        }
      }
    }
  });
}

TEST(pairs_are_turned) {
  constexpr size_t kColumns = 64, kDepth = 160;
  with_each_isa([&] {
    const std::vector<float> src = random_floats(kDepth * kColumns, 1, 7);
    std::vector<float> turned(src.size());
    ktk::products().transpose(kDepth, kColumns, src.data(), kColumns, turned.data(), kDepth);
    constexpr size_t kSteps = kDepth / KTK_PAIR_DEPTH, kTurnedSteps = kColumns / KTK_PAIR_DEPTH;
    std::vector<char> pairs(src.size() * 2), expected(pairs), found(pairs);
    ktk::products().pack_pairs(kDepth, kColumns, src.data(), kColumns, pairs.data(),
                               kSteps * KTK_PAIR_STEP_BYTES);
    ktk::products().pack_pairs(kColumns, kDepth, turned.data(), kDepth, expected.data(),
                               kTurnedSteps * KTK_PAIR_STEP_BYTES);
    for (size_t block = 0; block < kColumns / KTK_PAIR_COLUMNS; ++block) {
      ktk::products().turn_pairs(pairs.data() + block * kSteps * KTK_PAIR_STEP_BYTES, kSteps,
                                 found.data() + block * KTK_PAIR_STEP_BYTES,
                                 kTurnedSteps * KTK_PAIR_STEP_BYTES);
    }
    CHECK(found == expected);
  });
}

}  // namespace
