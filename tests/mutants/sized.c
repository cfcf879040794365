/* Backends whose packed matrices are as large as what is in them: the sound one behind a header, or
 * the header alone where each weight is zero.
 */
#include "sound.h"

enum { kHeader = KTK_ALIGNMENT };

static size_t size_of_zeros(const ktk_matrix* matrix) {
  (void)matrix;
  return kHeader;
}

static size_t size_unless_zero(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                               size_t n_end, size_t size) {
  const size_t bytes = matrix->k * (source->format.element == KTK_BF16 ? 2 : 4);
  for (size_t n = n_begin; n < n_end; ++n) {
    const char* row = (const char*)source->data + n * source->data_stride;
    for (size_t i = 0; i < bytes; ++i) {
      if (row[i]) return size;
    }
  }
  return kHeader;
}

static size_t source_size(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                          size_t n_end) {
  return size_unless_zero(matrix, source, n_begin, n_end, kHeader + weight_size(matrix));
}

/* Without the header. */
static size_t short_source_size(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                                size_t n_end) {
  return size_unless_zero(matrix, source, n_begin, n_end, weight_size(matrix));
}

static void pack_sized(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                       size_t n_end, void* packed, size_t bytes) {
  if (n_begin == 0) {
    memset(packed, 0, kHeader);
    *(char*)packed = bytes > kHeader;
  }
  if (bytes > kHeader) pack_weight(matrix, source, n_begin, n_end, (char*)packed + kHeader);
}

/* Where there are more bytes than zeros take, rows of before stay in them. */
static void pack_needed(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed, size_t bytes) {
  const int zero = source_size(matrix, source, 0, matrix->n) == kHeader;
  pack_sized(matrix, source, n_begin, n_end, packed, zero ? kHeader : bytes);
  if (n_begin == 0) *(char*)packed = bytes > kHeader;
}

static int is_zero(const void* packed) { return *(const char*)packed == 0; }

static void unpack_sized(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end,
                         float* out, size_t out_stride) {
  if (!is_zero(packed)) {
    unpack_weight(matrix, (const char*)packed + kHeader, n_begin, n_end, out, out_stride);
    return;
  }
  for (size_t n = n_begin; n < n_end; ++n, out += out_stride) {
    memset(out, 0, matrix->k * sizeof *out);
  }
}

static void run_sized(const ktk_matmul* mm) {
  if (!is_zero(mm->weight)) {
    ktk_matmul rows = *mm;
    rows.weight = (const char*)mm->weight + kHeader;
    run(&rows);
    return;
  }
  for (size_t row = 0; row < mm->m; ++row) {
    const uint16_t* act = act_row(mm->act, mm->act_stride, row);
    float sum = 0; /* NaN where a value is not finite */
    for (size_t k = 0; k < mm->matrix->k; ++k) sum += float_of(act[k]) * 0.0f;
    float* dst = mm->dst + row * mm->dst_stride;
    for (size_t n = 0; n < mm->n_end - mm->n_begin; ++n) dst[n] = sum;
  }
}

static void export_sized(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end,
                         const ktk_export* target) {
  if (!is_zero(packed)) {
    export_weight(matrix, (const char*)packed + kHeader, n_begin, n_end, target);
    return;
  }
  for (size_t n = n_begin; n < n_end; ++n) {
    memset((char*)target->data + n * target->data_stride, 0, matrix->k * sizeof(uint16_t));
  }
}

static int is_packed(const ktk_matrix* matrix, const void* packed, size_t bytes) {
  if (bytes < kHeader) return 0;
  return bytes == (is_zero(packed) ? kHeader : kHeader + weight_size(matrix));
}

static int believe(const ktk_matrix* matrix, const void* packed, size_t bytes) {
  return matrix && packed && bytes != SIZE_MAX;
}

#define SIZED                                                                                   \
  .layout = "sized rows", .weight_size = size_of_zeros, .pack_weight = NULL,                    \
  .unpack_weight = unpack_sized, .export_weight = export_sized, UKERNELS(run_sized, run_sized), \
  .pack_sized = pack_sized

ALONE(sized, SIZED, .source_size = source_size, .is_packed = is_packed)
ALONE(keeps_old_rows, SIZED, .pack_sized = pack_needed, .source_size = source_size,
      .is_packed = is_packed)
ALONE(believes_any_bytes, SIZED, .source_size = source_size, .is_packed = believe)
ALONE(source_size_short, SIZED, .source_size = short_source_size)
