// RMS norms of rows.
#pragma once

#include <cstddef>
#include <vector>

#include "moe/rows.h"

namespace ktk {

// A row by the root of its mean square, times weight + offset. `early`: rounded to the type of the
// row before that, too, as most models have it.
class Norm {
 public:
  // The weight has n elements side by side, which are copied.
  Norm(const void* weight, ktk_element type, size_t n, float epsilon, float offset, bool early);

  // n elements of `type`; `to` may be `from`.
  void operator()(const void* from, ktk_element type, void* to);

  // The same of the sum of two rows, which is rounded to `type` and written first.
  void of_sum(const void* a, const void* b, ktk_element type, void* sum, void* to);

  size_t n() const { return scale_.size(); }

 private:
  void finish(ktk_element type, void* to);

  std::vector<float> scale_, row_;
  float epsilon_;
  bool early_;
};

}  // namespace ktk
