/* Stands in for the Kunpeng Math Library, which nobody but its owners can install: the functions
 * that KML calls, in plain arithmetic, for all orders, transposes and offsets.
 *
 * -DWRONG=1 gives a result that is off by one, -DWRONG=2 leaves c alone, as a library may that
 * finds the CPU lacking, -DWRONG=3 has no product of int8 at all. -DTHREADS_OF_PROCESS has only
 * the older way to set the number of threads.
 */
#include <stddef.h>
#include <stdint.h>

static int products, told;
/* Of the calling thread, as a library that has threads would start them: all cores. */
static _Thread_local int threads = 64;
static int most_threads;

int stand_in_products(void) { return __atomic_load_n(&products, __ATOMIC_RELAXED); }
int stand_in_told(void) { return __atomic_load_n(&told, __ATOMIC_RELAXED); }
/* The most threads that a product was allowed to use. */
int stand_in_most_threads(void) { return __atomic_load_n(&most_threads, __ATOMIC_RELAXED); }

#ifdef THREADS_OF_PROCESS
void BlasSetNumThreads(int count)
#else
void BlasSetNumThreadsLocal(int count)
#endif
{
  threads = count;
  __atomic_add_fetch(&told, 1, __ATOMIC_RELAXED);
}

#if WRONG != 3
/* Arguments of 32 bits, as in the builds that are common; ktk passes 64. */
void cblas_gemm_s8s8s32(int order, int trans_a, int trans_b, int kind, int m, int n, int k,
                        float alpha, const void* a, int lda, int8_t offset_a, const void* b,
                        int ldb, int8_t offset_b, float beta, int32_t* c, int ldc,
                        const int32_t* offset_c) {
  const int8_t* left = a;
  const int8_t* right = b;
  const int rows = order == 101;
  __atomic_add_fetch(&products, 1, __ATOMIC_RELAXED);
  if (threads > most_threads) __atomic_store_n(&most_threads, threads, __ATOMIC_RELAXED);
  if (WRONG == 2) return;
  for (ptrdiff_t i = 0; i < m; ++i) {
    for (ptrdiff_t j = 0; j < n; ++j) {
      int64_t sum = WRONG == 1;
      for (ptrdiff_t t = 0; t < k; ++t) {
        const ptrdiff_t at = (trans_a == 112) == rows ? t * lda + i : i * lda + t;
        const ptrdiff_t bt = (trans_b == 112) == rows ? j * ldb + t : t * ldb + j;
        sum += (int64_t)(left[at] + offset_a) * (right[bt] + offset_b);
      }
      int32_t* to = c + (rows ? i * ldc + j : j * ldc + i);
      const double before = beta != 0 ? beta * (double)*to : 0;
      const int32_t more = offset_c[kind == 173 ? 0 : kind == 172 ? i : j];
      *to = (int32_t)(alpha * (double)sum + before) + more;
    }
  }
}
#endif
