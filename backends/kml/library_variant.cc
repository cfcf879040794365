// Variant cblas_s8: the codecs of the other variants around products of the library, which takes
// weights as plain rows.
//
//   packed   [n rows][k padded to 16 codes]   f32 scale[n], zeros
//
// Sums of a group are exact in int32 whoever computes them, and what follows is what the other
// variants do: a row has the bits that they give it.
#include <string.h>

#include <algorithm>

#include "codec/int8/rows.h"
#include "kml/act.h"
#include "kml/library.h"
#include "ktk/backend.h"

namespace ktk::kml {

void Calls::multiply(size_t m, size_t n, size_t k, const int8_t* a, size_t lda, const int8_t* b,
                     size_t ldb, int32_t* c, size_t ldc) const {
  // ktk's workers are the threads.
  thread_local const Calls* told = nullptr;
  if (told != this) {
    if (set_threads_local) {
      set_threads_local(1);
    } else if (set_threads) {
      set_threads(1);
    }
    told = this;
  }
  const auto size = [](size_t x) { return static_cast<int64_t>(x); };
  const int32_t offset = 0;
  gemm_s8(kRowMajor, kNoTrans, kTrans, kFixedOffset, size(m), size(n), size(k), 1, a, size(lda), 0,
          b, size(ldb), 0, 0, c, size(ldc), &offset);
}

namespace {

const Calls* calls;

// A call has a cost of its own, so tasks and products of a task are not cut as small as ours.
constexpr size_t kStep = 64, kTile = 256;

size_t scales_offset(const ktk_matrix* matrix) { return matrix->n * padded_k(matrix); }
size_t rows_size(const ktk_matrix* matrix) {
  return round_up(scales_offset(matrix) + matrix->n * sizeof(float), KTK_ALIGNMENT);
}
size_t row_offset(const ktk_matrix* matrix, size_t n) { return n * padded_k(matrix); }

const float* scales(const ktk_matrix* matrix, const void* packed) {
  return reinterpret_cast<const float*>(static_cast<const char*>(packed) + scales_offset(matrix));
}

template <class Rows>
void pack_rows(const ktk_matrix* matrix, Rows& rows, size_t n_begin, size_t n_end, void* packed) {
  float* scale = const_cast<float*>(scales(matrix, packed));
  for (size_t n = n_begin; n < n_end; ++n) {
    scale[n] = rows.scale(n);
    uint8_t* row = static_cast<uint8_t*>(packed) + row_offset(matrix, n);
    for (size_t k = 0; k < matrix->k; k += kDepth) rows.codes(n, k, row + k);
  }
  if (n_end == matrix->n) {
    char* bytes = static_cast<char*>(packed);
    std::fill(reinterpret_cast<char*>(scale + n_end), bytes + rows_size(matrix), 0);
  }
}

void pack(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin, size_t n_end,
          void* packed) {
  with_rows<1, kDepth>(matrix, source,
                       [&](auto rows) { pack_rows(matrix, rows, n_begin, n_end, packed); });
}

void unpack(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end, float* out,
            size_t out_stride) {
  for (size_t n = n_begin; n < n_end; ++n, out += out_stride) {
    const int8_t* row = static_cast<const int8_t*>(packed) + row_offset(matrix, n);
    const float scale = scales(matrix, packed)[n];
    for (size_t k = 0; k < matrix->k; ++k) out[k] = static_cast<float>(row[k]) * scale;
  }
}

size_t scratch_size(const ktk_matrix*, size_t m) { return m * kTile * sizeof(int32_t); }

// Sums of one group for columns [n, n + columns) on their way into dst.
void add_group(const ktk_matmul* mm, size_t n, size_t columns, size_t group, const int32_t* sums) {
  const char* act = static_cast<const char*>(mm->act);
  const float* weight_scale = scales(mm->matrix, mm->weight) + n;
  const bool last = group + 1 == Act::num_groups(mm->matrix);
  for (size_t row = 0; row < mm->m; ++row, sums += kTile) {
    const float scale = act_scale(mm->matrix, act + row * mm->act_stride)[group];
    float* dst = mm->dst + row * mm->dst_stride + (n - mm->n_begin);
    for (size_t j = 0; j < columns; ++j) {
      const float before = group == 0 ? 0 : dst[j];
      const float after = __builtin_fmaf(static_cast<float>(sums[j]), scale, before);
      dst[j] = last ? after * weight_scale[j] : after;
    }
  }
}

void run(const ktk_matmul* mm) {
  const ktk_matrix* matrix = mm->matrix;
  int32_t* sums = static_cast<int32_t*>(mm->scratch);
  for (size_t n = mm->n_begin; n < mm->n_end; n += kTile) {
    const size_t columns = smaller(kTile, mm->n_end - n);
    for (size_t group = 0; group < Act::num_groups(matrix); ++group) {
      const size_t k = group * Act::kGroup;
      const int8_t* act = static_cast<const int8_t*>(mm->act) + k;
      const int8_t* weight = static_cast<const int8_t*>(mm->weight) + row_offset(matrix, n) + k;
      calls->multiply(mm->m, columns, smaller(Act::kGroup, matrix->k - k), act, mm->act_stride,
                      weight, padded_k(matrix), sums, kTile);
      add_group(mm, n, columns, group, sums);
    }
  }
}

struct Rows {
  static constexpr char kLayout[] = "i8-rows-k16";
  static constexpr uint32_t kNStep = kStep;
  static constexpr auto size = rows_size;
  static constexpr auto pack = kml::pack;
  static constexpr auto unpack = kml::unpack;
  static constexpr auto offset = row_offset;
};

struct Variant {
  using Weight = Rows;
  using Act = kml::Act;
  static constexpr char kName[] = "cblas_s8";
  static constexpr ktk_ukernel kUkernels[] = {ukernel("cblas_gemm_s8s8s32", run, scratch_size)};
};

constexpr ktk_variant kVariant = make_variant<Variant>();

}  // namespace

const ktk_variant* library_variant(const Calls* found) {
  calls = found;
  return &kVariant;
}

}  // namespace ktk::kml
