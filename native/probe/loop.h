// The loop all units share: independent chains of one operation, as many as hide its latency.
#pragma once

#include <stddef.h>

namespace {

// Keeps the compiler from computing with what it knows about the value.
template <class T>
inline void opaque(T& value) {
  asm volatile("" : "+v"(value));
}

// op(acc) is one step of a chain. kChains accumulators and the operands of op must fit the register
// file; 12 cover the longest latency (6 cycles) on two ports.
template <int kChains, class T, class Op>
inline void run_chains(size_t iterations, Op op) {
  T acc[kChains] = {};
#pragma GCC unroll 16
  for (int i = 0; i < kChains; i++) opaque(acc[i]);
  for (size_t n = 0; n < iterations; n++) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; i++) {
      acc[i] = op(acc[i]);
      opaque(acc[i]);
    }
  }
}

}  // namespace
