// Arithmetic on sizes that never wraps: numbers come from callers, files and backends' tables.
#pragma once

#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <string>

namespace ktk {

// More bytes than a process has addresses (x86-64 with four levels of page tables).
inline constexpr size_t kMostBytes = size_t{1} << 47;

[[noreturn]] inline void refuse_size(const std::string& what) {
  throw std::length_error(what + " is more than the 2^47 bytes that a process can address");
}

// a * b. Throws std::length_error with both numbers where that is more than kMostBytes.
inline size_t product(size_t a, size_t b) {
  size_t result;
  if (__builtin_mul_overflow(a, b, &result) || result > kMostBytes) {
    refuse_size(std::to_string(a) + " x " + std::to_string(b));
  }
  return result;
}

// The product of three and more.
template <typename... More>
size_t product(size_t a, size_t b, size_t c, More... more) {
  return product(product(a, b), c, more...);
}

// a + b, likewise.
inline size_t sum(size_t a, size_t b) {
  size_t result;
  if (__builtin_add_overflow(a, b, &result) || result > kMostBytes) {
    refuse_size(std::to_string(a) + " + " + std::to_string(b));
  }
  return result;
}

// The least multiple of `step` that is not below `value`, likewise.
inline size_t round_up(size_t value, size_t step) { return sum(value, step - 1) / step * step; }

// The least common multiple, likewise.
inline size_t common_multiple(size_t a, size_t b) { return product(a / std::gcd(a, b), b); }

// How many groups cover an extent; one group where `group` is 0.
inline size_t groups_of(size_t extent, size_t group) {
  return group ? extent / group + (extent % group != 0) : 1;
}

}  // namespace ktk
