// What a call of a layer reads and writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/size.h"
#include "moe/lora.h"
#include "moe/route.h"
#include "moe/rows.h"

namespace ktk {

struct Request {
  Rows hidden;  // [tokens, H], read only
  Choice choice;
  Rows out;                       // [tokens, H]; no data: nothing beyond gate and up is computed
  std::span<const uint8_t> skip;  // one byte per expert, != 0: contributes nothing
  const Lora* lora = nullptr;
  // Where the products of gate and up are kept, without biases and routing weights, for a backward
  // pass: two rows of I for each of a token's choices, [tokens, top_k, 2, I], or one without a
  // gate. What is not computed is not written. With adapters, rows have kept_columns(): behind I
  // elements is x A^T of the same matrix, times the adapter's scale, in f32.
  Rows kept;
};

inline size_t kept_columns(const Config& config, const Lora* lora) {
  const size_t each = sizeof(float) / sizeof(uint16_t);  // elements of bf16
  return sum(config.intermediate, product(lora ? lora->most_rank() : 0, each));
}

}  // namespace ktk
