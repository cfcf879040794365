/* Backends with faults that show in layers: beyond what small matrices have, or in what the core
 * does with a backend that the kit's other properties do not.
 */
#include "sound.h"

enum { kFewRows = 128, kFewColumns = 512, kFifteenBits = 0x7fff };

/* --- beyond small matrices ------------------------------------------------------------------- */

static void run_few_rows(const ktk_matmul* mm) {
  run(mm);
  for (size_t row = kFewRows; row < mm->m; ++row) {
    float* dst = mm->dst + row * mm->dst_stride;
    memcpy(dst, dst - kFewRows * mm->dst_stride, (mm->n_end - mm->n_begin) * sizeof *dst);
  }
}

static void multiply(const ktk_matmul* mm, size_t columns, size_t depth) {
  for (size_t row = 0; row < mm->m; ++row) {
    const uint16_t* act = act_row(mm->act, mm->act_stride, row);
    float* dst = mm->dst + row * mm->dst_stride;
    for (size_t n = mm->n_begin; n < mm->n_end; ++n) {
      const uint16_t* weight = (const uint16_t*)mm->weight + weight_at(mm->matrix, n % columns);
      dst[n - mm->n_begin] = dot(act, weight, depth, 0);
    }
  }
}
static void run_few_columns(const ktk_matmul* mm) { multiply(mm, kFewColumns, mm->matrix->k); }
static void run_short_depth(const ktk_matmul* mm) {
  multiply(mm, SIZE_MAX, mm->matrix->k & kFifteenBits);
}

/* --- what the core does with a backend ------------------------------------------------------- */

/* Every other row is summed up from its end. */
static void run_by_place(const ktk_matmul* mm) {
  run(mm);
  for (size_t row = 1; row < mm->m; row += 2) {
    const uint16_t* act = act_row(mm->act, mm->act_stride, row);
    for (size_t n = mm->n_begin; n < mm->n_end; ++n) {
      const uint16_t* weight = (const uint16_t*)mm->weight + weight_at(mm->matrix, n);
      mm->dst[row * mm->dst_stride + n - mm->n_begin] = dot(act, weight, mm->matrix->k, 1);
    }
  }
}

/* A tile unit that is left after each product, where products follow each other. */
static __thread int entered;
static void enter(void) { entered = 1; }
static void leave(void) { entered = 0; }
static void run_leaving(const ktk_matmul* mm) {
  if (entered) {
    run(mm);
  } else {
    for (size_t row = 0; row < mm->m; ++row) {
      memset(mm->dst + row * mm->dst_stride, 0, (mm->n_end - mm->n_begin) * sizeof *mm->dst);
    }
  }
  entered = 0;
}

ALONE(few_rows, UKERNELS(run_few_rows, run_few_rows))
ALONE(few_columns, UKERNELS(run_few_columns, run_few_columns))
ALONE(short_depth, UKERNELS(run_short_depth, run_short_depth))
ALONE(depends_on_place, UKERNELS(run_by_place, run_by_place))
ALONE(leaves_early, UKERNELS(run_leaving, run_leaving), .enter = enter, .leave = leave)
