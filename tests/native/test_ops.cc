// Derivatives of the activation functions against finite differences in float64, and the products
// of float matrices, with every instruction set that this CPU has.
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

// The argument of sigmoid.
double argument(const ktk_glu& glu, double g) {
  if (glu.kind == KTK_SWIGLUOAI) return static_cast<double>(glu.alpha) * g;
  if (glu.kind == KTK_GELU_TANH) {
    return 2 * std::sqrt(2 / std::acos(-1.0)) * (g + 0.044715 * g * g * g);
  }
  return g;
}

double offset(const ktk_glu& glu) { return glu.kind == KTK_SWIGLUOAI ? 1 : 0; }

double result(const ktk_glu& glu, double g, double u) {
  const double limit = static_cast<double>(glu.limit);
  g = std::min(g, limit);
  if (glu.clamp_gate_below) g = std::max(g, -limit);
  u = std::clamp(u, -limit, limit);
  return g * sigmoid(argument(glu, g)) * (u + offset(glu));
}

struct Derivatives {
  double g, u;
};

Derivatives differences(const ktk_glu& glu, double g, double u) {
  constexpr double kStep = 1e-5;
  return {(result(glu, g + kStep, u) - result(glu, g - kStep, u)) / (2 * kStep),
          (result(glu, g, u + kStep) - result(glu, g, u - kStep)) / (2 * kStep)};
}

// What f32 may lose. exp is off by 8 units and by 8 roundings of its argument, the rest by 16
// roundings of terms that are no larger than sigmoid(z) * (1 + |g z'|); the difference by its cubic
// term, of which 1e-9 is more than any of these functions has.
double allowed(const ktk_glu& glu, double g, double size, double u) {
  const double z = argument(glu, g), slope = glu.kind == KTK_GELU_TANH ? 3 * z : z;
  const double terms = sigmoid(z) * (1 + std::abs(slope) * sigmoid(-z));
  return ((32 + 16 * std::abs(z)) * kUnit * terms + 1e-9 + 0x1p-120) * size * (std::abs(u) + 1);
}

std::vector<ktk_glu> all_activations() {
  std::vector<ktk_glu> all;
  const float inf = std::numeric_limits<float>::infinity();
  for (const auto& one : kActivations) {
    for (const float limit : {inf, 2.0f}) {
      for (const bool below : {false, true}) all.push_back({one.kind, 1.702f, limit, below});
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
            const size_t at = row * kStride + i;
            CHECK_EQ(h[at], forward[at]);
            const float gi = g[at] + (gb ? gb[i] : 0), ui = u[at] + (ub ? ub[i] : 0);
            const double d = static_cast<double>(dh[at]), limit = static_cast<double>(glu.limit);
            const Derivatives want =
                differences(glu, static_cast<double>(gi), static_cast<double>(ui));
            const double weighted = std::abs(static_cast<double>(weights[row]) * d);
            // A difference across the edge of a clamp is none.
            const double from_edge = std::min(std::abs(std::abs(static_cast<double>(gi)) - limit),
                                              std::abs(std::abs(static_cast<double>(ui)) - limit));
            if (from_edge > 1e-4) {
              const double clamped = std::min(static_cast<double>(gi), limit);
              const double factor = static_cast<double>(weights[row]) * d;
              const double bound = allowed(glu, clamped, weighted, static_cast<double>(ui));
              CHECK(std::abs(static_cast<double>(gate[at]) - factor * want.g) <= bound);
              CHECK(std::abs(static_cast<double>(up[at]) - factor * want.u) <=
                    bound * (1 + std::abs(clamped)));
            }
            dot += d * static_cast<double>(h[at]);
            size += std::abs(d * static_cast<double>(h[at]));
          }
          CHECK(std::abs(static_cast<double>(dots[row]) - dot) <= (kColumns + 20) * kUnit * size);
        }
      }
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
        CHECK(std::isfinite(gate[i]));
        CHECK(std::isfinite(up[i]));
      }
      CHECK(std::isnan(gate.back()));
    }
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
              gemm(i_end - i, j_end - j, l_end - l, &a[i * a_row + l * a_column], a_row, a_column,
                   &b[l * (n + 5) + j], n + 5, &parts[i * (n + 1) + j], n + 1);
            }
          }
        }
        CHECK(std::memcmp(whole.data(), parts.data(), whole.size() * sizeof(float)) == 0);
      }
    }
  });
}

TEST(transpose_moves_and_rounds) {
  with_each_isa([&] {
    for (const auto& [rows, columns] :
         {std::pair{size_t{16}, size_t{16}}, std::pair{size_t{37}, size_t{53}}}) {
      const std::vector<float> src = random_floats(rows * (columns + 3), 1, 7);
      std::vector<float> floats(columns * (rows + 1));
      std::vector<uint16_t> halves(columns * (rows + 1)), rounded(src.size());
      const auto transpose = ktk::products().transpose;
      transpose(rows, columns, src.data(), columns + 3, KTK_F32, floats.data(), rows + 1);
      transpose(rows, columns, src.data(), columns + 3, KTK_BF16, halves.data(), rows + 1);
      ktk::ops().from_f32(src.data(), KTK_BF16, src.size(), rounded.data());
      for (size_t r = 0; r < rows; ++r) {
        for (size_t c = 0; c < columns; ++c) {
          CHECK_EQ(floats[c * (rows + 1) + r], src[r * (columns + 3) + c]);
          CHECK_EQ(halves[c * (rows + 1) + r], rounded[r * (columns + 3) + c]);
        }
      }
    }
  });
}

}  // namespace
