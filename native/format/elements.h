// What matrices are made of: names, and how many bytes hold how many elements.
#pragma once

#include <cstddef>
#include <string>

#include "ktk/abi.h"

namespace ktk {

// The least part of a row that fills whole bytes: one float, two 4-bit codes, or a block of one of
// ggml's types, which has its scales within. Rows hold whole blocks, and are cut between them only.
struct Block {
  size_t columns, bytes;

  size_t bytes_of(size_t count) const { return (count + columns - 1) / columns * bytes; }
};

// {0, 0} for an element that is none, or one of ggml's that is not in the table.
Block block_of(ktk_element element);
// Bits of one element; 0 where an element is known only as part of a block.
size_t element_bits(ktk_element element);
// Whether it is one of ggml's types.
inline bool is_ggml(ktk_element element) { return element >= KTK_GGML; }

// "f32", "e4m3"; ggml's types as ggml calls them, in lower case, or "ggml:99" for an unknown one.
std::string element_name(ktk_element element);
// Inverse of element_name, which takes "ggml:12" for a known type as well. Throws
// std::invalid_argument.
ktk_element element_from_name(const std::string& name);

}  // namespace ktk
