/* Compiles the ABI as strict C11 and makes a table with it, as a backend in C would. */
#include "ktk/abi.h"

static size_t weight_size(const ktk_matrix* matrix) { return matrix->n * matrix->k; }

static void run(const ktk_matmul* mm) { mm->dst[0] = 0.0f; }

static const ktk_ukernel ukernels[] = {
    {.struct_size = sizeof(ktk_ukernel), .name = "any", .m_max = SIZE_MAX, .run = run},
};
static const ktk_variant variant = {
    .struct_size = sizeof(ktk_variant),
    .name = "avx2",
    .required_isa = KTK_ISA_AVX2 | KTK_ISA_SVE,
    .tile = {1, 16, 32},
    .act = {.element = KTK_I8, .scale = KTK_F32, .group_n = 1, .group_k = 128},
    .weight_size = weight_size,
    .ukernels = ukernels,
    .num_ukernels = 1,
};
static const ktk_variant* const variants[] = {&variant};
static const ktk_backend backend = {
    .struct_size = sizeof(ktk_backend),
    .abi_major = KTK_ABI_MAJOR,
    .abi_minor = KTK_ABI_MINOR,
    .name = "C",
    .variants = variants,
    .num_variants = 1,
};

int main(void) {
  const ktk_matrix matrix = {.n = 2, .k = 3, .format = {.element = KTK_GGML + 2}};
  _Static_assert(sizeof(ktk_isa) == 8, "a bit set of 64 instruction sets");
  return backend.variants[0]->weight_size(&matrix) == 6 ? 0 : 1;
}
