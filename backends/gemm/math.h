// Sizes.
#pragma once

#include <stddef.h>

namespace ktk {
namespace {

constexpr size_t kLine = 64;  // bytes of a cache line

constexpr size_t smaller(size_t a, size_t b) { return a < b ? a : b; }
constexpr size_t ceil_div(size_t x, size_t step) { return (x + step - 1) / step; }
constexpr size_t round_up(size_t x, size_t step) { return ceil_div(x, step) * step; }

}  // namespace
}  // namespace ktk
