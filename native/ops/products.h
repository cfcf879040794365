// Products of float matrices that are not packed, compiled once per instruction set: for factors of
// low rank and gradients of weights. Products of packed weights are the backends'.
#pragma once

#include <stddef.h>

#include "ktk/abi.h"

typedef struct ktk_products {
  // c[m][n] += a[m][k] x b[k][n] in f32. a(i, l) is a[i * a_row + l * a_column], rows of b and c
  // are b_row and c_row floats apart. Each element of c is one chain of additions over ascending l
  // that starts with what it is before: cutting m, n or k into several calls changes no bit.
  void (*gemm)(size_t m, size_t n, size_t k, const float* a, size_t a_row, size_t a_column,
               const float* b, size_t b_row, float* c, size_t c_row);
  // dst[columns][rows] = src[rows][columns], as KTK_F32 or KTK_BF16 (round to nearest even).
  void (*transpose)(size_t rows, size_t columns, const float* src, size_t src_row, ktk_element type,
                    void* dst, size_t dst_row);
} ktk_products;
