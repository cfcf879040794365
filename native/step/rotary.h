// Rotary embeddings of rows at one position.
#pragma once

#include <cstddef>
#include <vector>

#include "moe/rows.h"

namespace ktk {

// A row times cosine, plus the same row with its halves swapped, the first of them negative then,
// times sine: each product rounded to the type of the row, as their sum is. Cosine and sine may be
// shorter than rows, whose ends stay.
class Rotary {
 public:
  // n elements each, an even number, which are copied.
  Rotary(const void* cosine, ktk_element cosine_type, const void* sine, ktk_element sine_type,
         size_t n);

  // A row of `columns` elements, n at least; `to` may be `from`.
  void operator()(const void* from, ktk_element type, size_t columns, void* to);

  size_t n() const { return cosine_.size(); }

 private:
  std::vector<float> cosine_, sine_, row_, swapped_;
  std::vector<char> rounded_;
};

}  // namespace ktk
