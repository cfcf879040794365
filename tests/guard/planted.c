/* Backends with faults that guard mode shows, one for each kind of memory that the core cuts. */
#include "../mutants/sound.h"

static volatile uint16_t seen;

/* Reads a row behind the packed weight. */
static void reads_weight_behind(const ktk_matmul* mm) {
  run(mm);
  seen = ((const uint16_t*)mm->weight)[weight_at(mm->matrix, round_up(mm->matrix->n, kColumnStep))];
}

/* Reads a row behind the activations; the last of its own are padding that it may read. */
static void reads_act_behind(const ktk_matmul* mm) {
  run(mm);
  seen = act_row(mm->act, mm->act_stride, round_up(mm->m, kRowStep))[0];
}

/* Reads a cache line behind the scratch memory that it has asked for. */
static size_t some_scratch(const ktk_matrix* matrix, size_t m) {
  (void)matrix, (void)m;
  return 100;
}
static void reads_scratch_behind(const ktk_matmul* mm) {
  run(mm);
  seen = ((const uint16_t*)mm->scratch)[64];
}

/* Writes a row behind the panel; the last of its own are padding that it may write. */
static void writes_dst_behind(const ktk_matmul* mm) {
  run(mm);
  mm->dst[round_up(mm->m, kRowStep) * mm->dst_stride] = 0;
}

/* Leaves the last column of a product as it was. */
static void leaves_a_column(const ktk_matmul* mm) {
  ktk_matmul less = *mm;
  --less.n_end;
  run(&less);
}

/* Adds to what was there. */
static void adds_to_dst(const ktk_matmul* mm) {
  for (size_t row = 0; row < mm->m; ++row) {
    float* dst = mm->dst + row * mm->dst_stride;
    const uint16_t* act = act_row(mm->act, mm->act_stride, row);
    for (size_t n = mm->n_begin; n < mm->n_end; ++n) {
      const uint16_t* weight = (const uint16_t*)mm->weight + weight_at(mm->matrix, n);
      dst[n - mm->n_begin] += dot(act, weight, mm->matrix->k, 0);
    }
  }
}

/* Packs all but the last row. */
static void leaves_a_row(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                         size_t n_end, void* packed) {
  pack_weight(matrix, source, n_begin, n_end - (n_end == matrix->n), packed);
}

#define WITH(kernel, scratch)                                                               \
  .num_ukernels = 1, .ukernels = (const ktk_ukernel[]) {                                    \
    {                                                                                       \
      .struct_size = sizeof(ktk_ukernel), .name = "gemm", .m_max = SIZE_MAX, .run = kernel, \
      .scratch_size = scratch                                                               \
    }                                                                                       \
  }

ALONE(sound)
ALONE(weight_behind, WITH(reads_weight_behind, NULL))
ALONE(act_behind, WITH(reads_act_behind, NULL))
ALONE(scratch_behind, WITH(reads_scratch_behind, some_scratch))
ALONE(dst_behind, WITH(writes_dst_behind, NULL))
ALONE(column_unwritten, WITH(leaves_a_column, NULL))
ALONE(dst_unwritten, WITH(adds_to_dst, NULL))
ALONE(weight_unwritten, .pack_weight = leaves_a_row)
