/* Stands in for AMD's libraries and for BLIS, where neither is at hand: the same functions with the
 * same arguments, slow and simple, with a count of what a caller did wrong.
 *
 *   -DDLP          AOCL-DLP: no bli_ and cblas_ functions, a pointer more in the reorder calls
 *   -DNO_LPGEMM    a BLIS without AMD's addition
 *   -DINT_BITS=64  BLAS integers of 64 bits
 *   -DGENERIC      a BLIS that does not know the CPU
 *   -DSILENT       prints a line and leaves the product alone
 *   -DSATURATES    adds pairs of products in 16 bits
 *   -DOVERRUNS     reordering writes more than it said
 *   -DSALT=1       reorders in another way
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifndef INT_BITS
#define INT_BITS 32
#endif
#ifndef SALT
#define SALT 0
#endif

/* What the tests look at. Threads: what AMD's libraries keep for each thread, 4 until it is set. */
static _Thread_local int64_t threads = 4;
int64_t standin_calls, standin_with_threads, standin_not_null;

static void count_call(void) {
  __atomic_fetch_add(&standin_calls, 1, __ATOMIC_RELAXED);
  if (threads != 1) __atomic_fetch_add(&standin_with_threads, 1, __ATOMIC_RELAXED);
}

#ifdef DLP
#define META , void* meta
#define CHECK_META count_null(meta)
void dlp_thread_set_num_threads_local(int64_t count) { threads = count; }
void dlp_version_query(int* major, int* minor, int* patch) { *major = 5, *minor = 3, *patch = 0; }
#else
#define META
#define CHECK_META (void)0
void bli_thread_set_num_threads(int64_t count) { threads = count; }
void bli_init(void) {}
const char* bli_info_get_version_str(void) { return "stand-in 1.0"; }
int64_t bli_info_get_blas_int_type_size(void) { return INT_BITS; }

static const char* const kFamilies[] = {"skx", "haswell", "zen", "zen2", "zen3", "generic"};
const char* bli_arch_string(int id) { return kFamilies[id]; }
int bli_arch_query_id(void) {
#ifdef GENERIC
  return 5;
#else
  return 4;
#endif
}

/* Every call of the tests is row-major, a plain, b transposed. */
void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                 const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  count_call();
  if (order != 101 || trans_a != 111 || trans_b != 112 || alpha != 1 || beta != 0) return;
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      float sum = 0;
      for (int p = 0; p < k; ++p) sum += a[(int64_t)i * lda + p] * b[(int64_t)j * ldb + p];
      c[(int64_t)i * ldc + j] = sum;
    }
  }
}
#endif

#ifndef NO_LPGEMM
static void count_null(const void* last) {
  if (last) __atomic_fetch_add(&standin_not_null, 1, __ATOMIC_RELAXED);
}

/* Reordered: depth in fours as the dot products want them, bytes flipped, then the sums of columns.
 * Depth is padded to 4, columns to 16. */
static int64_t pad(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
static int64_t place(int64_t row, int64_t column, int64_t n) {
  return row / 4 * pad(n, 16) * 4 + column * 4 + row % 4;
}
static const uint8_t kFlip = 0x80 ^ SALT;

size_t aocl_get_reorder_buf_size_s8s8s32os32(char order, char trans, char matrix, int64_t k,
                                             int64_t n META) {
  CHECK_META;
  if (order != 'r' || trans != 't' || matrix != 'B') return 0;
  return (size_t)(pad(k, 4) * pad(n, 16) + 4 * pad(n, 16));
}

void aocl_reorder_s8s8s32os32(char order, char trans, char matrix, const int8_t* b, int8_t* out,
                              int64_t k, int64_t n, int64_t ldb META) {
  CHECK_META;
  count_call();
  if (order != 'r' || trans != 't' || matrix != 'B') return;
  int8_t* sums = out + pad(k, 4) * pad(n, 16);
  for (int64_t column = 0; column < n; ++column) {
    int32_t sum = 0;
    for (int64_t row = 0; row < k; ++row) {
      const int8_t code = b[column * ldb + row];
      out[place(row, column, n)] = (int8_t)(code ^ kFlip);
      sum += code;
    }
    memcpy(sums + 4 * column, &sum, 4);
  }
#ifdef OVERRUNS
  sums[4 * pad(n, 16)] = 1;
#endif
}

void aocl_gemm_s8s8s32os32(char order, char trans_a, char trans_b, int64_t m, int64_t n, int64_t k,
                           int32_t alpha, const int8_t* a, int64_t lda, char format_a,
                           const int8_t* b, int64_t ldb, char format_b, int32_t beta, int32_t* c,
                           int64_t ldc, void* post) {
  count_null(post);
  count_call();
  (void)ldb;
#ifdef SILENT
  printf("stand-in: this processor has no AVX512_VNNI\n");
  if (k) return;
#endif
  if (order != 'r' || trans_a != 'n' || trans_b != 't' || format_a != 'n' || format_b != 'r' ||
      alpha != 1 || beta != 0) {
    return;
  }
  for (int64_t i = 0; i < m; ++i) {
    int32_t* row = c + i * ldc;
    memset(row, 0, (size_t)n * sizeof *row);
    for (int64_t p = 0; p < k; ++p) {
      const int32_t x = a[i * lda + p];
      if (x == 0) continue;
      for (int64_t j = 0; j < n; ++j) {
        const int32_t product = x * (int8_t)(b[place(p, j, n)] ^ kFlip);
        row[j] += product;
#ifdef SATURATES
        if (p % 2 && row[j] < -32768) row[j] = -32768;
#endif
      }
    }
  }
}
#endif
