// Products of float matrices that are not packed, compiled once per instruction set: for factors of
// low rank and gradients of weights. Products of packed weights are the backends'.
#pragma once

#include <stddef.h>

#include "ktk/abi.h"

// Columns of a block and rows of a step of what pack_pairs() writes, and the bytes of a step.
enum { KTK_PAIR_COLUMNS = 32, KTK_PAIR_DEPTH = 32, KTK_PAIR_STEP_BYTES = 2048 };

typedef struct ktk_products {
  // c[m][n] += a[m][k] x b[k][n] in f32. a(i, l) is a[i * a_row + l * a_column], rows of b and c
  // are b_row and c_row floats apart. Each element of c is one chain of additions over ascending l
  // that starts with what it is before: cutting m, n or k into several calls changes no bit.
  void (*gemm)(size_t m, size_t n, size_t k, const float* a, size_t a_row, size_t a_column,
               const float* b, size_t b_row, float* c, size_t c_row);
  // The same as if c were zeros: it is not read. k is not 0.
  void (*gemm_of_zeros)(size_t m, size_t n, size_t k, const float* a, size_t a_row, size_t a_column,
                        const float* b, size_t b_row, float* c, size_t c_row);
  // dst[columns][rows] = src[rows][columns].
  void (*transpose)(size_t rows, size_t columns, const float* src, size_t src_row, float* dst,
                    size_t dst_row);
  // Packs src[depth][columns] as bf16 (round to nearest even) for products that add up over its
  // rows. Rows follow each other two by two, so that nothing is transposed:
  //
  //   block of 32 columns         step of 32 rows       tile: 16 columns, 1 KiB
  //   +----------------------+    +--------+            +-----------------------------------+
  //   | row 0..31    (2 KiB) | -> | tile 0 | c = 0..15  | rows 0, 1: c = 0 | ... | c = 15    |
  //   | row 32..63           |    | tile 1 | c = 16..31 | rows 2, 3: c = 0 | ... | c = 15    |
  //   | ...                  |    +--------+            | ...                               |
  //   +----------------------+                          +-----------------------------------+
  //
  // `dst` is where the step of row 0 is in the first block; blocks are `block_bytes` apart. What
  // fills up the last step and the last block is zeros.
  void (*pack_pairs)(size_t depth, size_t columns, const float* src, size_t src_row, char* dst,
                     size_t block_bytes);
  // Transposes what pack_pairs() wrote: a block of `steps` steps becomes, for 32 rows, a step of
  // each of so many blocks, which are `block_bytes` apart.
  void (*turn_pairs)(const char* src, size_t steps, char* dst, size_t block_bytes);
} ktk_products;
