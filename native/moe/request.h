// What a call of a layer reads and writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

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
  // gate. What is not computed is not written.
  Rows kept;
};

}  // namespace ktk
