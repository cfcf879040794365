// The order of a matrix's columns, where they are packed in another than they come in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace ktk {

// Column i of what is packed is column (*order)[i] of the matrix; NULL: they are as they were. GPTQ
// with desc_act sorts columns by how much they matter before it makes groups of them:
//
//   matrix   | c0 | c1 | c2 | c3 |        order   | 2 | 0 | 3 | 1 |
//   packed   | c2 | c0 | c3 | c1 |
//
// Experts with the same order share one.
using Order = std::shared_ptr<const std::vector<uint32_t>>;

inline bool same(const Order& a, const Order& b) { return a == b || (a && b && *a == *b); }

// A row of the matrix as a row of what is packed.
void sort_columns(const Order& order, const float* from, float* to);

// Rows of what is packed, `stride` floats apart, as rows of the matrix, in place.
void restore_columns(const Order& order, size_t rows, float* data, size_t stride);
// The same for rows of `columns` floats that are in an order themselves.
void restore_rows(const Order& order, size_t columns, float* data);

}  // namespace ktk
