/* Backends that compute what they should, but whose functions do not return, or use more memory
 * than their tables say.
 */
#include <stdlib.h>

#include "sound.h"

/* --- functions that do not return ------------------------------------------------------------ */

void throw_42(void); /* in C++ */

static void pack_weight_throwing(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                                 size_t n_end, void* packed) {
  if (n_begin > 0) throw_42();
  pack_weight(matrix, source, n_begin, n_end, packed);
}

static void run_throwing(const ktk_matmul* mm) {
  if (mm->n_begin > 0) throw_42();
  run(mm);
}

static void unpack_weight_endless(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                  size_t n_end, float* out, size_t out_stride) {
  for (volatile size_t i = 0; n_begin > 0; ++i) continue;
  unpack_weight(matrix, packed, n_begin, n_end, out, out_stride);
}

static void export_weight_crashing(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                   size_t n_end, const ktk_export* target) {
  *(volatile char*)(matrix->n > 2 ? NULL : target->data) = 0;
  export_weight(matrix, packed, n_begin, n_end, target);
}

static void export_weight_aborting(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                   size_t n_end, const ktk_export* target) {
  if (matrix->n > 2) abort();
  export_weight(matrix, packed, n_begin, n_end, target);
}

/* --- memory ---------------------------------------------------------------------------------- */

static size_t short_weight_size(const ktk_matrix* matrix) {
  return weight_size(matrix) - KTK_ALIGNMENT;
}

static void pack_weight_before(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                               size_t n_end, void* packed) {
  if (n_begin == 0) ((volatile char*)packed)[-1] = 0;
  pack_weight(matrix, source, n_begin, n_end, packed);
}

static void pack_weight_reading_on(const ktk_matrix* matrix, const ktk_source* source,
                                   size_t n_begin, size_t n_end, void* packed) {
  (void)((const volatile char*)source->data)[n_end * source->data_stride];
  pack_weight(matrix, source, n_begin, n_end, packed);
}

static void unpack_weight_on(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                             size_t n_end, float* out, size_t out_stride) {
  unpack_weight(matrix, packed, n_begin, n_end, out, out_stride);
  out[(n_end - n_begin) * out_stride] = 0;
}

static size_t short_act_size(const ktk_matrix* matrix) {
  const size_t size = act_size(matrix);
  return size > KTK_ALIGNMENT ? size - KTK_ALIGNMENT : size;
}

/* A vector more than there are bytes in the last row. */
static void pack_act_on(const ktk_matrix* matrix, size_t m, size_t k_begin, size_t k_end,
                        const float* x, size_t x_stride, void* act, size_t act_stride) {
  pack_act(matrix, m, k_begin, k_end, x, x_stride, act, act_stride);
  if (k_end == matrix->k) memset((char*)act + m * act_stride, 0, 32);
}

static void run_on(const ktk_matmul* mm) {
  run(mm);
  mm->dst[round_up(mm->m, kRowStep) * mm->dst_stride] = 0;
}

static void run_adding(const ktk_matmul* mm) {
  for (size_t row = 0; row < mm->m; ++row) {
    float* dst = mm->dst + row * mm->dst_stride;
    float before[1024];
    memcpy(before, dst, (mm->n_end - mm->n_begin) * sizeof *dst);
    ktk_matmul one = *mm;
    one.m = 1;
    one.act = act_row(mm->act, mm->act_stride, row);
    one.dst = dst;
    run(&one);
    for (size_t n = 0; n < mm->n_end - mm->n_begin; ++n) dst[n] += before[n];
  }
}

/* A row of activations is copied to scratch. */
static size_t short_scratch_size(const ktk_matrix* matrix, size_t m) {
  (void)m;
  return act_size(matrix) - KTK_ALIGNMENT;
}
static void run_from_scratch(const ktk_matmul* mm) {
  for (size_t row = 0; row < mm->m; ++row) {
    memcpy(mm->scratch, act_row(mm->act, mm->act_stride, row), mm->act_stride);
    ktk_matmul one = *mm;
    one.m = 1;
    one.act = mm->scratch;
    one.dst = mm->dst + row * mm->dst_stride;
    run(&one);
  }
}
#define SCRATCH                                                              \
  .num_ukernels = 1, .ukernels = (const ktk_ukernel[]) {                     \
    {                                                                        \
      .struct_size = sizeof(ktk_ukernel), .name = "gemm", .m_max = SIZE_MAX, \
      .scratch_size = short_scratch_size, .run = run_from_scratch            \
    }                                                                        \
  }

/* Its caller computes without subnormals from then on. */
static void run_flushing(const ktk_matmul* mm) {
  run(mm);
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8000);
#else
  uint64_t fpcr;
  __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
  __asm__ volatile("msr fpcr, %0" ::"r"(fpcr | 1 << 24));
#endif
}

/* As instructions do that want their memory aligned. */
static void run_on_pairs_of_lines(const ktk_matmul* mm) {
  if ((uintptr_t)mm->weight % (2 * KTK_ALIGNMENT)) abort();
  run(mm);
}

ALONE(weight_size_short, .weight_size = short_weight_size)
ALONE(packs_before_weights, .pack_weight = pack_weight_before)
ALONE(reads_behind_source, .pack_weight = pack_weight_reading_on)
ALONE(unpacks_behind_out, .unpack_weight = unpack_weight_on)
ALONE(act_size_short, .act_size = short_act_size)
ALONE(packs_behind_acts, .pack_act = pack_act_on)
ALONE(scratch_size_short, SCRATCH)
ALONE(runs_behind_dst, UKERNELS(run_on, run_on))
ALONE(loses_registers, UKERNELS(run_flushing, run_flushing))
ALONE(wants_more_alignment, UKERNELS(run_on_pairs_of_lines, run_on_pairs_of_lines))
ALONE(adds_to_dst, UKERNELS(run_adding, run_adding))
ALONE(throws_in_pack, .pack_weight = pack_weight_throwing)
ALONE(throws_in_run, UKERNELS(run_throwing, run_throwing))
ALONE(never_returns, .unpack_weight = unpack_weight_endless)
ALONE(crashes, .export_weight = export_weight_crashing)
ALONE(aborts, .export_weight = export_weight_aborting)
