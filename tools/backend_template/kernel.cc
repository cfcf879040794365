// @NAME@ with loops that the compiler vectorises: the baseline, and what faster variants are
// compared with. Compiled once per instruction set, without the C++ library.
#include "@name@/layout.h"
#include "ktk/backend.h"

namespace {

// --- weight codec ---

size_t weight_size(const ktk_matrix* matrix) {
  return round_up(matrix->n, kColumns) * matrix->k * sizeof(float);
}

void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin, size_t n_end,
                 void* packed) {
  for (size_t n = n_begin; n < round_up(n_end, kColumns); ++n) {
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
  const size_t lines = round_up(matrix->k * sizeof(float), KTK_ALIGNMENT) / KTK_ALIGNMENT;
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

// --- micro-kernels ---

// Rows [row, row + kRows) of one block of columns. Each output is one chain of fused multiply-adds
// over k, so its bits do not depend on the rows beside it.
template <int kRows>
void block(const ktk_matmul* mm, size_t n, size_t row) {
  const float* weight = static_cast<const float*>(mm->weight) + block_offset(mm->matrix, n);
  float sum[kRows][kColumns] = {};
  for (size_t k = 0; k < mm->matrix->k; ++k) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float act = act_row(mm->act, mm->act_stride, row + r)[k];
#pragma GCC unroll 16
      for (size_t c = 0; c < kColumns; ++c) {
        sum[r][c] = __builtin_fmaf(act, weight[k * kColumns + c], sum[r][c]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float* dst = mm->dst + (row + r) * mm->dst_stride + (n - mm->n_begin);
    __builtin_memcpy(dst, sum[r], sizeof sum[r]);
  }
}

template <int kRows>
void run(const ktk_matmul* mm) {
  for (size_t n = mm->n_begin; n < mm->n_end; n += kColumns) {
    size_t row = 0;
    for (; row + kRows <= mm->m; row += kRows) block<kRows>(mm, n, row);
    for (; row < mm->m; ++row) block<1>(mm, n, row);
  }
}

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
  static constexpr ktk_ukernel kUkernels[] = {
      ktk::ukernel("gemv_1x16", 3, run<1>),
      ktk::ukernel("gemm_4x16", run<4>),
  };
};

}  // namespace

KTK_EXPORT_VARIANT(@name @, Variant)
