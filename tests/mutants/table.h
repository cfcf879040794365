/* What every file of mutants has: its backends, of the file's kFormats and kAccepts. */
#include <string.h>

#include "ktk/abi.h"

static inline size_t round_up(size_t size, size_t step) { return (size + step - 1) / step * step; }

/* Padding behind the last row, where a range of packed rows ends there. */
static inline void pad(const ktk_matrix* matrix, size_t n_end, void* packed, size_t row_bytes,
                       size_t size) {
  const size_t used = matrix->n * row_bytes;
  if (n_end == matrix->n) memset((char*)packed + used, 0, size - used);
}

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* The arguments behind the name are the addresses of variants, best first. */
#define BACKEND(symbol, ...)                                           \
  static const ktk_variant* const symbol##_variants[] = {__VA_ARGS__}; \
  const ktk_backend symbol = {                                         \
      .struct_size = sizeof(ktk_backend),                              \
      .abi_major = KTK_ABI_MAJOR,                                      \
      .abi_minor = KTK_ABI_MINOR,                                      \
      .name = #symbol,                                                 \
      .formats = kFormats,                                             \
      .num_formats = COUNT(kFormats),                                  \
      .accepts = kAccepts,                                             \
      .num_accepts = COUNT(kAccepts),                                  \
      .variants = symbol##_variants,                                   \
      .num_variants = COUNT(symbol##_variants),                        \
  };
