#include "moe/order.h"

#include <algorithm>

#include "core/size.h"

namespace ktk {

void sort_columns(const Order& order, const float* from, float* to) {
  const uint32_t* const at = order->data();
  const size_t columns = order->size();
  for (size_t i = 0; i < columns; ++i) to[i] = from[at[i]];
}

void restore_columns(const Order& order, size_t rows, float* data, size_t stride) {
  if (!order) return;
  const size_t columns = order->size();
  std::vector<float> sorted(columns);
  for (size_t r = 0; r < rows; ++r) {
    float* const row = data + r * stride;
    std::copy_n(row, columns, sorted.begin());
    for (size_t i = 0; i < columns; ++i) row[(*order)[i]] = sorted[i];
  }
}

void restore_rows(const Order& order, size_t columns, float* data) {
  if (!order) return;
  const std::vector<float> sorted(data, data + product(order->size(), columns));
  for (size_t i = 0; i < order->size(); ++i) {
    std::copy_n(sorted.data() + i * columns, columns, data + (*order)[i] * columns);
  }
}

}  // namespace ktk
