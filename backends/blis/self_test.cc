#include "blis/self_test.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

namespace ktk::blis {
namespace {

// Whole blocks and such as end a matrix, and one row: libraries have code of their own for that.
struct Size {
  size_t m, n, k;
};
constexpr Size kSizes[] = {{5, 48, 64}, {33, kNr, kDepth}, {1, kNr, kDepth}, {3, 16, 192}};

constexpr size_t kStride = kNr + 1;       // of products; the last column has to stay as it is
constexpr int32_t kUntouched = 0x5a5a00;  // a float holds it, and no product is as large
constexpr int8_t kGuard = 0x5a;
constexpr size_t kGuardBytes = 64;

int64_t wide(size_t x) { return static_cast<int64_t>(x); }

// Codes of any value, and in a corner the largest product there is: sums of 16 bits do not hold it.
struct Problem {
  Size size;
  std::vector<int8_t> a, b;  // [m][k], [n][k]

  explicit Problem(const Size& of) : size(of), a(of.m * of.k), b(of.n * of.k) {
    uint32_t state = 1;
    const auto next = [&state] {
      state = state * 1664525 + 1013904223;
      return static_cast<int8_t>(state >> 24);
    };
    std::generate(a.begin(), a.end(), [&] { return std::max<int8_t>(next(), -127); });
    std::generate(b.begin(), b.end(), next);
    std::fill_n(a.begin(), size.k, int8_t{127});
    std::fill_n(b.begin(), size.k, int8_t{-128});
  }

  int32_t product(size_t row, size_t column) const {
    int32_t sum = 0;
    for (size_t k = 0; k < size.k; ++k) sum += a[row * size.k + k] * b[column * size.k + k];
    return sum;
  }

  template <class Integer>
  std::vector<Integer> room() const {
    return std::vector<Integer>(size.m * kStride, Integer{kUntouched});
  }

  template <class Integer>
  void check(const std::vector<Integer>& c) const {
    if (c == room<Integer>()) {
      fail("leaves the product", "untouched, as libraries do where the CPU lacks something");
    }
    for (size_t i = 0; i < size.m; ++i) {
      for (size_t j = 0; j < kStride; ++j) {
        const int32_t expected = j < size.n ? product(i, j) : kUntouched;
        if (c[i * kStride + j] != static_cast<Integer>(expected)) {
          fail("makes a wrong product", "of int8 codes");
        }
      }
    }
  }

  [[noreturn]] void fail(const char* what, const char* how) const {
    char text[160];
    std::snprintf(text, sizeof text, "%s of %zu x %zu x %zu %s", what, size.m, size.n, size.k, how);
    throw std::runtime_error(text);
  }
};

// The weights of a problem as the library reorders them.
struct Reordered {
  std::unique_ptr<int8_t, decltype(&std::free)> data{nullptr, &std::free};
  size_t bytes;

  Reordered(const Calls& calls, const Problem& problem) {
    const int64_t k = wide(problem.size.k), n = wide(problem.size.n);
    bytes = calls.reorder_size('r', 't', 'B', k, n, nullptr);
    if (bytes < problem.b.size() || bytes > 16 * problem.b.size() + 65536) {
      problem.fail("wants", (std::to_string(bytes) + " bytes for reordered weights").c_str());
    }
    const size_t room = (bytes + kGuardBytes + 63) / 64 * 64;
    data.reset(static_cast<int8_t*>(std::aligned_alloc(KTK_ALIGNMENT, room)));
    if (!data) throw std::bad_alloc();
    std::fill_n(data.get(), bytes, int8_t{0});
    std::fill_n(data.get() + bytes, kGuardBytes, kGuard);
    calls.reorder('r', 't', 'B', problem.b.data(), data.get(), k, n, k, nullptr);
    const int8_t* end = data.get() + bytes;
    if (std::any_of(end, end + kGuardBytes, [](int8_t byte) { return byte != kGuard; })) {
      problem.fail("reordering weights", "writes more than was said");
    }
  }
};

}  // namespace

void test_lpgemm(const Calls& calls) {
  for (const Size& size : kSizes) {
    const Problem problem(size);
    const Reordered b(calls, problem);
    std::vector<int32_t> c = problem.room<int32_t>();
    calls.gemm_s8('r', 'n', 't', wide(size.m), wide(size.n), wide(size.k), 1, problem.a.data(),
                  wide(size.k), 'n', b.data.get(), wide(size.k), 'r', 0, c.data(), kStride,
                  nullptr);
    problem.check(c);
  }
}

void test_sgemm(const Calls& calls) {
  for (const Size& size : kSizes) {
    const Problem problem(size);
    const std::vector<float> a(problem.a.begin(), problem.a.end());
    const std::vector<float> b(problem.b.begin(), problem.b.end());
    std::vector<float> c = problem.room<float>();
    const int m = static_cast<int>(size.m), n = static_cast<int>(size.n);
    const int k = static_cast<int>(size.k);
    calls.sgemm(kRowMajor, kNoTrans, kTrans, m, n, k, 1.0f, a.data(), k, b.data(), k, 0.0f,
                c.data(), kStride);
    problem.check(c);
  }
}

std::string reorder_fingerprint(const Calls& calls) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const Size& size : kSizes) {
    const Problem problem(size);
    const Reordered b(calls, problem);
    for (size_t i = 0; i < b.bytes; ++i) {
      hash = (hash ^ static_cast<uint8_t>(b.data.get()[i])) * 0x100000001b3;
    }
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

}  // namespace ktk::blis
