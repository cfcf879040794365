// Vectors are gcc's own, which it maps to the registers of each target.
#include "ops/products.h"

#include "ktk/target.h"

namespace {

// A register of the target. Wider vectors would be legal, but gcc keeps sums that take several
// registers each on the stack.
#if defined(__AVX512F__)
constexpr size_t kLanes = 16;
#elif defined(__AVX2__)
constexpr size_t kLanes = 8;
#else
constexpr size_t kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

// Sums of a tile stay in registers, of which there are 32, or 16 with AVX2. A tile is two cache
// lines wide with AVX-512 and one otherwise.
#if defined(__AVX512F__)
constexpr size_t kMr = 12, kVectors = 2;
#elif defined(__AVX2__)
constexpr size_t kMr = 6, kVectors = 2;
#else
constexpr size_t kMr = 6, kVectors = 4;
#endif
constexpr size_t kNr = kVectors * kLanes;
// Rows of b that a panel of kNr columns keeps in L1 while rows of a pass it.
constexpr size_t kDepth = 256;

// What all tiles of a product share. Operands come beside it as values: to read them from memory
// that was just written would cost a tile more than some steps of its depth.
struct Shape {
  size_t k, a_row, a_column, b_row, c_row;
  bool begins;  // with zeros: c is not read
};

template <size_t kRows, size_t kWidth>
void tile(const Shape& shape, const float* a, const float* b, float* c) {
  const size_t a_row = shape.a_row, a_column = shape.a_column, b_row = shape.b_row;
  const size_t c_row = shape.c_row;
  Floats sums[kRows][kWidth];
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (size_t v = 0; v < kWidth; ++v) {
      const float* const sum = c + i * c_row + v * kLanes;
      sums[i][v] = shape.begins ? Floats{} : *reinterpret_cast<const Floats*>(sum);
    }
  }
  for (size_t l = shape.k; l > 0; --l, a += a_column, b += b_row) {
    Floats row[kWidth];
#pragma GCC unroll 4
    for (size_t v = 0; v < kWidth; ++v) row[v] = *reinterpret_cast<const Floats*>(b + v * kLanes);
#pragma GCC unroll 12
    for (size_t i = 0; i < kRows; ++i) {
      const float factor = a[i * a_row];
#pragma GCC unroll 4
      for (size_t v = 0; v < kWidth; ++v) sums[i][v] += factor * row[v];
    }
  }
#pragma GCC unroll 12
  for (size_t i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (size_t v = 0; v < kWidth; ++v) {
      *reinterpret_cast<Floats*>(c + i * c_row + v * kLanes) = sums[i][v];
    }
  }
}

template <size_t kWidth, size_t kRows = kMr>
void tile_of(size_t rows, const Shape& shape, const float* a, const float* b, float* c) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return tile<kRows, kWidth>(shape, a, b, c);
    tile_of<kWidth, kRows - 1>(rows, shape, a, b, c);
  }
}

// Rows are dealt out evenly over tiles.
template <size_t kWidth>
void columns(size_t m, const Shape& shape, const float* a, const float* b, float* c) {
  const size_t tiles = (m + kMr - 1) / kMr;
  for (size_t t = 0, row = 0; t < tiles; ++t) {
    const size_t end = m * (t + 1) / tiles;
    tile_of<kWidth>(end - row, shape, a + row * shape.a_row, b, c + row * shape.c_row);
    row = end;
  }
}

// Fewer columns than a vector, on copies that have one.
void last_columns(size_t m, size_t n, Shape shape, const float* a, const float* b, float* c) {
  float rows_of_b[kDepth][kLanes] = {}, sums[kMr][kLanes] = {};
  for (size_t l = 0; l < shape.k; ++l) {
    __builtin_memcpy(rows_of_b[l], b + l * shape.b_row, n * sizeof(float));
  }
  const size_t c_row = shape.c_row;
  shape.b_row = shape.c_row = kLanes;
  for (size_t row = 0; row < m; row += kMr, a += kMr * shape.a_row, c += kMr * c_row) {
    const size_t rows = m - row < kMr ? m - row : kMr;
    for (size_t i = 0; i < rows && !shape.begins; ++i) {
      __builtin_memcpy(sums[i], c + i * c_row, n * sizeof(float));
    }
    tile_of<1>(rows, shape, a, rows_of_b[0], sums[0]);
    for (size_t i = 0; i < rows; ++i) __builtin_memcpy(c + i * c_row, sums[i], n * sizeof(float));
  }
}

template <bool kOfZeros>
void gemm(size_t m, size_t n, size_t k, const float* a, size_t a_row, size_t a_column,
          const float* b, size_t b_row, float* c, size_t c_row) {
  for (size_t l = 0; l < k; l += kDepth) {
    const size_t depth = k - l < kDepth ? k - l : kDepth;
    const Shape shape = {depth, a_row, a_column, b_row, c_row, kOfZeros && l == 0};
    const float *const part_of_a = a + l * a_column, *const part_of_b = b + l * b_row;
    size_t j = 0;
    for (; j + kNr <= n; j += kNr) columns<kVectors>(m, shape, part_of_a, part_of_b + j, c + j);
    for (; j + kLanes <= n; j += kLanes) columns<1>(m, shape, part_of_a, part_of_b + j, c + j);
    if (j < n) last_columns(m, n - j, shape, part_of_a, part_of_b + j, c + j);
  }
}

// --- transpose ----------------------------------------------------------------------------------

constexpr int kSide = kLanes;  // a square of them fits the registers
typedef Floats Side;
typedef uint32_t SideBits __attribute__((vector_size(kSide * 4)));

// Elements of the lower (or, from kSide / 2 on, the upper) halves of two vectors, by turns.
inline Side interleave(Side x, Side y, int from) {
#if defined(__clang__)  // has no shuffle by a variable
  Side both;
  for (int i = 0; i < kSide; ++i) both[i] = (i % 2 ? y : x)[from + i / 2];
  return both;
#else
  SideBits order;
  for (int i = 0; i < kSide; ++i) {
    order[i] = static_cast<uint32_t>(from + i / 2 + (i % 2 ? kSide : 0));
  }
  return __builtin_shuffle(x, y, order);
#endif
}

inline void transpose_square(Side (&rows)[kSide]) {
#pragma GCC unroll 4
  for (int step = 1; step < kSide; step *= 2) {
    Side next[kSide];
#pragma GCC unroll 8
    for (int i = 0; i < kSide / 2; ++i) {
      next[2 * i] = interleave(rows[i], rows[i + kSide / 2], 0);
      next[2 * i + 1] = interleave(rows[i], rows[i + kSide / 2], kSide / 2);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) rows[i] = next[i];
  }
}

void transpose(size_t rows, size_t columns, const float* src, size_t src_row, float* dst,
               size_t dst_row) {
  size_t r = 0;
  for (; r + kSide <= rows; r += kSide) {
    const float* const from = src + r * src_row;
    size_t c = 0;
    for (; c + kSide <= columns; c += kSide) {
      Side square[kSide];
#pragma GCC unroll 16
      for (size_t i = 0; i < kSide; ++i) {
        square[i] = *reinterpret_cast<const Side*>(from + i * src_row + c);
      }
      transpose_square(square);
#pragma GCC unroll 16
      for (size_t i = 0; i < kSide; ++i) {
        *reinterpret_cast<Side*>(dst + (c + i) * dst_row + r) = square[i];
      }
    }
    for (; c < columns; ++c) {
      for (size_t i = 0; i < kSide; ++i) dst[c * dst_row + r + i] = from[i * src_row + c];
    }
  }
  for (; r < rows; ++r) {
    for (size_t c = 0; c < columns; ++c) dst[c * dst_row + r] = src[r * src_row + c];
  }
}

// --- pairs --------------------------------------------------------------------------------------

typedef uint32_t Bits __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

constexpr size_t kLine = 64, kTileBytes = KTK_PAIR_STEP_BYTES / 2, kTileColumns = 16;
constexpr size_t kPairDepth = KTK_PAIR_DEPTH;
// bf16 in the upper halves. A NaN stays one, as in from_f32.
inline void round(const float* from, Bits& to) {
  const Bits bits = reinterpret_cast<Bits>(*reinterpret_cast<const Floats*>(from));
  const Bits even = bits + 0x7fff + (bits >> 16 & 1);
  to = (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : even;
}

// A tile of rows and columns that are all there. The processor does not expect lines of the tile at
// `next`, which is a block away.
inline void pair_tile(const float* src, size_t src_row, char* to, const char* next) {
#pragma GCC unroll 4
  for (size_t i = 0; i < KTK_PAIR_DEPTH / 2; ++i, src += 2 * src_row) {
    __builtin_prefetch(next + i * kLine, 1);
#pragma GCC unroll 4
    for (size_t c = 0; c < kTileColumns; c += kLanes) {
      Bits low, high;
      round(src + c, low);
      round(src + src_row + c, high);
      *reinterpret_cast<Bits*>(to + i * kLine + c * 4) = low >> 16 | (high & 0xffff0000);
    }
  }
}

// Step by step: blocks are often a multiple of a page apart, so that lines of several blocks share
// a set of the cache.
void pack_pairs(size_t depth, size_t columns, const float* src, size_t src_row, char* dst,
                size_t block_bytes) {
  for (size_t k = 0; k < depth; k += KTK_PAIR_DEPTH, dst += KTK_PAIR_STEP_BYTES) {
    const size_t rows = depth - k < kPairDepth ? depth - k : kPairDepth;
    char* step = dst;
    for (size_t block = 0; block < columns; block += KTK_PAIR_COLUMNS, step += block_bytes) {
      for (size_t c = block; c < block + KTK_PAIR_COLUMNS; c += kTileColumns) {
        char* const to = step + (c - block) / kTileColumns * kTileBytes;
        const float* const from = src + k * src_row + c;
        if (rows == KTK_PAIR_DEPTH && c + kTileColumns <= columns) {
          pair_tile(from, src_row, to, to + block_bytes);
          continue;
        }
        float edge[KTK_PAIR_DEPTH][kTileColumns] = {};
        const size_t left = columns < c ? 0 : columns - c;
        const size_t count = left < kTileColumns ? left : kTileColumns;
        for (size_t i = 0; i < rows; ++i) {
          __builtin_memcpy(edge[i], from + i * src_row, count * sizeof(float));
        }
        pair_tile(edge[0], kTileColumns, to, to);
      }
    }
  }
}

// Rows of a square of pairs: two rows and kSide pairs become pairs of the rows, 2 * kSide of them.
inline void turn_square(const char* src, char* dst, size_t column, size_t line) {
  Side square[kSide];
#pragma GCC unroll 16
  for (size_t i = 0; i < kSide; ++i) square[i] = *reinterpret_cast<const Side*>(src + i * kLine);
  transpose_square(square);
#pragma GCC unroll 8
  for (size_t i = 0; i < kSide / 2; ++i) {
    const SideBits first = reinterpret_cast<SideBits>(square[2 * i]);
    const SideBits second = reinterpret_cast<SideBits>(square[2 * i + 1]);
    const Side even = reinterpret_cast<Side>((first & 0xffff) | second << 16);
    const Side odd = reinterpret_cast<Side>(first >> 16 | (second & 0xffff0000));
#pragma GCC unroll 2
    for (size_t half = 0; half < 2; ++half) {
      const size_t at = column + half * kSide;
      char* const to =
          dst + at / kTileColumns * kTileBytes + (line + i) * kLine + at % kTileColumns * 4;
      *reinterpret_cast<Side*>(to) = interleave(even, odd, static_cast<int>(half) * kSide / 2);
    }
  }
}

void turn_pairs(const char* src, size_t steps, char* dst, size_t block_bytes) {
  // Steps of `src`, which are one behind the other, those of the next block too.
  constexpr size_t kAhead = 4 * KTK_PAIR_STEP_BYTES;
  for (; steps > 0; --steps, src += KTK_PAIR_STEP_BYTES, dst += block_bytes) {
    for (size_t i = 0; i < KTK_PAIR_STEP_BYTES; i += kLine) {
      __builtin_prefetch(src + kAhead + i);
      if (steps > 1) __builtin_prefetch(dst + block_bytes + i, 1);
    }
    for (size_t n = 0; n < KTK_PAIR_COLUMNS; n += kSide) {
      const char* const from = src + n / kTileColumns * kTileBytes + n % kTileColumns * 4;
      for (size_t pair = 0; pair < KTK_PAIR_DEPTH / 2; pair += kSide) {
        turn_square(from + pair * kLine, dst, 2 * pair, n / 2);
      }
    }
  }
}

}  // namespace

extern "C" const ktk_products KTK_VARIANT(products);
extern "C" const ktk_products KTK_VARIANT(products) = {.gemm = gemm<false>,
                                                       .gemm_of_zeros = gemm<true>,
                                                       .transpose = transpose,
                                                       .pack_pairs = pack_pairs,
                                                       .turn_pairs = turn_pairs};
