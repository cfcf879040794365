// @NAME@ with loops that the compiler vectorizes: the baseline, and what faster variants are
// compared with. Compiled once per instruction set, without the C++ library.
#include "@name@/layout.h"
#include "gemm/driver.h"
#include "ktk/backend.h"

namespace {

// --- weight codec ---

size_t weight_size(const ktk_matrix* matrix) {
  return ktk::round_up(matrix->n, kColumns) * matrix->k * sizeof(float);
}

void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin, size_t n_end,
                 void* packed) {
  for (size_t n = n_begin; n < ktk::round_up(n_end, kColumns); ++n) {
    float* out = static_cast<float*>(packed) + block_offset(matrix, n) + n % kColumns;
    const char* row = static_cast<const char*>(source->data) + n * source->data_stride;
    for (size_t k = 0; k < matrix->k; ++k) {
      float value = 0;
      if (n < n_end) __builtin_memcpy(&value, row + k * sizeof value, sizeof value);
      out[k * kColumns] = value;
    }
  }
}

void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end,
                   float* out, size_t out_stride) {
  for (size_t n = n_begin; n < n_end; ++n) {
    const float* in = static_cast<const float*>(packed) + block_offset(matrix, n) + n % kColumns;
    float* row = out + (n - n_begin) * out_stride;
    for (size_t k = 0; k < matrix->k; ++k) row[k] = in[k * kColumns];
  }
}

size_t weight_offset(const ktk_matrix* matrix, size_t n) {
  return block_offset(matrix, n) * sizeof(float);
}

// --- activation codec: f32 rows, an odd number of cache lines apart ---

size_t act_size(const ktk_matrix* matrix) {
  const size_t lines = ktk::round_up(matrix->k * sizeof(float), KTK_ALIGNMENT) / KTK_ALIGNMENT;
  return (lines | 1) * KTK_ALIGNMENT;
}

const float* act_row(const void* act, size_t act_stride, size_t row) {
  return reinterpret_cast<const float*>(static_cast<const char*>(act) + row * act_stride);
}

void pack_act(const ktk_matrix*, size_t m, size_t k_begin, size_t k_end, const float* x,
              size_t x_stride, void* act, size_t act_stride) {
  for (size_t row = 0; row < m; ++row) {
    float* out = reinterpret_cast<float*>(static_cast<char*>(act) + row * act_stride) + k_begin;
    __builtin_memcpy(out, x + row * x_stride, (k_end - k_begin) * sizeof(float));
  }
}

void unpack_act(const ktk_matrix* matrix, size_t m, const void* act, size_t act_stride, float* out,
                size_t out_stride) {
  for (size_t row = 0; row < m; ++row) {
    __builtin_memcpy(out + row * out_stride, act_row(act, act_stride, row),
                     matrix->k * sizeof(float));
  }
}

// --- micro-kernel: what gemm/driver.h wants to know ---

// Rows x 16 columns, over the depth of a run. Each output is one chain of fused multiply-adds over
// k, so its bits do not depend on the rows beside it.
template <size_t kRows>
void multiply_tile(const ktk::Tile& tile) {
  float sum[kRows][kColumns] = {};
  for (size_t r = 0; r < kRows; ++r) {
    if (!tile.is_first()) __builtin_memcpy(sum[r], tile.dst + r * tile.dst_stride, sizeof sum[r]);
  }
  ktk::Fetch fetch = tile.fetch;
  const float* weight = reinterpret_cast<const float*>(tile.block) + tile.begin * kColumns;
  for (size_t k = tile.begin; k < tile.end; ++k, weight += kColumns) {
    fetch.next();  // for a cache line of weights, what comes later
#pragma GCC unroll 8
    for (size_t r = 0; r < kRows; ++r) {
      const float act = act_row(tile.act, tile.act_stride, r)[k];
#pragma GCC unroll 16
      for (size_t c = 0; c < kColumns; ++c) sum[r][c] = __builtin_fmaf(act, weight[c], sum[r][c]);
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    __builtin_memcpy(tile.dst + r * tile.dst_stride, sum[r], sizeof sum[r]);
  }
}

struct Kernel {
  static constexpr size_t kMr = 4, kNr = kColumns;
  static constexpr size_t kLineProducts = 1;
  static constexpr auto kTiles =
      ktk::row_table<kMr>([]<size_t kRows> { return &multiply_tile<kRows>; });

  size_t depth;
  explicit Kernel(const ktk_matmul* mm) : depth(mm->matrix->k) {}
  size_t slabs() const { return depth; }
  static size_t offset(size_t k) { return k * kColumns * sizeof(float); }
  static size_t passes(size_t) { return 1; }
  static void tile(const ktk::Tile& tile) { kTiles[tile.rows](tile); }
};

struct WeightCodec {
  static constexpr char kLayout[] = "@name@-f32-n16";
  static constexpr uint32_t kNStep = kColumns;
  static constexpr auto size = weight_size;
  static constexpr auto pack = pack_weight;
  static constexpr auto unpack = unpack_weight;
  static constexpr auto offset = weight_offset;
};

struct ActCodec {
  static constexpr ktk_format kFormat = {KTK_F32, KTK_NONE, KTK_NONE, 0, 0};
  static constexpr uint32_t kKStep = 1;
  static constexpr auto size = act_size;
  static constexpr auto pack = pack_act;
  static constexpr auto unpack = unpack_act;
};

struct Variant {
  using Weight = WeightCodec;
  using Act = ActCodec;
  static constexpr ktk_ukernel kUkernels[] = {ktk::ukernel("gemm_4x16", ktk::gemm<Kernel>)};
};

}  // namespace

KTK_EXPORT_VARIANT(@name@, Variant)
