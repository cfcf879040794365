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
                                   size_t n_end, const ktk_target* target) {
  *(volatile char*)(matrix->n > 2 ? NULL : target->data) = 0;
  export_weight(matrix, packed, n_begin, n_end, target);
}

static void export_weight_aborting(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                                   size_t n_end, const ktk_target* target) {
  if (matrix->n > 2) abort();
  export_weight(matrix, packed, n_begin, n_end, target);
}

ALONE(throws_in_pack, .pack_weight = pack_weight_throwing)
ALONE(throws_in_run, UKERNELS(run_throwing, run_throwing))
ALONE(never_returns, .unpack_weight = unpack_weight_endless)
ALONE(crashes, .export_weight = export_weight_crashing)
ALONE(aborts, .export_weight = export_weight_aborting)
