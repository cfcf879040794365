// The binary layout of abi.h, by number. A backend that was built against an older header of the
// same MAJOR must find every field where it was: lines are added here, never changed.
#include <cstddef>

#include "check.h"
#include "ktk/abi.h"

#define OFFSET(type, field, offset) static_assert(offsetof(type, field) == (offset))

static_assert(sizeof(void*) == 8, "ktk is for 64-bit systems");
static_assert(KTK_ABI_MAJOR == 1 && KTK_ABI_MINOR == 0);
static_assert(KTK_ALIGNMENT == 64);

static_assert(KTK_ISA_AVX2 == 1u << 0);
static_assert(KTK_ISA_AVX_VNNI == 1u << 1);
static_assert(KTK_ISA_AVX512 == 1u << 2);
static_assert(KTK_ISA_AVX512_VNNI == 1u << 3);
static_assert(KTK_ISA_AVX512_BF16 == 1u << 4);
static_assert(KTK_ISA_AVX512_VBMI == 1u << 5);
static_assert(KTK_ISA_AVX512_FP16 == 1u << 6);
static_assert(KTK_ISA_AMX_INT8 == 1u << 7);
static_assert(KTK_ISA_AMX_BF16 == 1u << 8);
static_assert(KTK_ISA_NEON == 1ull << 32);
static_assert(KTK_ISA_DOTPROD == 1ull << 33);
static_assert(KTK_ISA_I8MM == 1ull << 34);
static_assert(KTK_ISA_ARM_BF16 == 1ull << 35);
static_assert(KTK_ISA_SVE == 1ull << 36);

static_assert(KTK_NONE == 0 && KTK_F32 == 1 && KTK_F16 == 2 && KTK_BF16 == 3);
static_assert(KTK_I8 == 4 && KTK_U8 == 5 && KTK_I4 == 6 && KTK_U4 == 7);
static_assert(KTK_E4M3 == 8 && KTK_E5M2 == 9 && KTK_E2M1 == 10 && KTK_UE8M0 == 11);
static_assert(KTK_GGML == 256 && sizeof(ktk_element) == 4);

static_assert(sizeof(ktk_format) == 20);
OFFSET(ktk_format, element, 0);
OFFSET(ktk_format, scale, 4);
OFFSET(ktk_format, zero, 8);
OFFSET(ktk_format, group_n, 12);
OFFSET(ktk_format, group_k, 16);

static_assert(sizeof(ktk_matrix) == 40);
OFFSET(ktk_matrix, n, 0);
OFFSET(ktk_matrix, k, 8);
OFFSET(ktk_matrix, format, 16);

static_assert(sizeof(ktk_source) == 72);
OFFSET(ktk_source, format, 0);
OFFSET(ktk_source, data, 24);
OFFSET(ktk_source, scale, 32);
OFFSET(ktk_source, zero, 40);
OFFSET(ktk_source, data_stride, 48);
OFFSET(ktk_source, scale_stride, 56);
OFFSET(ktk_source, zero_stride, 64);

static_assert(sizeof(ktk_tile) == 12);
OFFSET(ktk_tile, m_step, 0);
OFFSET(ktk_tile, n_step, 4);
OFFSET(ktk_tile, k_step, 8);

static_assert(sizeof(ktk_matmul) == 104);
OFFSET(ktk_matmul, struct_size, 0);
OFFSET(ktk_matmul, matrix, 8);
OFFSET(ktk_matmul, weight, 16);
OFFSET(ktk_matmul, n_begin, 24);
OFFSET(ktk_matmul, n_end, 32);
OFFSET(ktk_matmul, m, 40);
OFFSET(ktk_matmul, act, 48);
OFFSET(ktk_matmul, act_stride, 56);
OFFSET(ktk_matmul, dst, 64);
OFFSET(ktk_matmul, dst_stride, 72);
OFFSET(ktk_matmul, scratch, 80);
OFFSET(ktk_matmul, next, 88);
OFFSET(ktk_matmul, prefetch, 96);

static_assert(sizeof(ktk_fetch) == 8);
OFFSET(ktk_fetch, ahead, 0);
OFFSET(ktk_fetch, cache, 4);
OFFSET(ktk_fetch, order, 6);

static_assert(sizeof(ktk_prefetch) == 96);
OFFSET(ktk_prefetch, struct_size, 0);
OFFSET(ktk_prefetch, few, 8);
OFFSET(ktk_prefetch, one, 16);
OFFSET(ktk_prefetch, pair, 24);
OFFSET(ktk_prefetch, many, 32);
OFFSET(ktk_prefetch, decode, 40);
OFFSET(ktk_prefetch, few_products, 48);
OFFSET(ktk_prefetch, in_order_products, 56);
OFFSET(ktk_prefetch, pages_products, 64);
OFFSET(ktk_prefetch, l1_ahead, 72);
OFFSET(ktk_prefetch, decode_rows, 80);
OFFSET(ktk_prefetch, accumulators, 88);

static_assert(sizeof(ktk_ukernel) == 40);
OFFSET(ktk_ukernel, struct_size, 0);
OFFSET(ktk_ukernel, name, 8);
OFFSET(ktk_ukernel, m_max, 16);
OFFSET(ktk_ukernel, scratch_size, 24);
OFFSET(ktk_ukernel, run, 32);

static_assert(sizeof(ktk_variant) == 200);
OFFSET(ktk_variant, struct_size, 0);
OFFSET(ktk_variant, name, 8);
OFFSET(ktk_variant, required_isa, 16);
OFFSET(ktk_variant, tile, 24);
OFFSET(ktk_variant, layout, 40);
OFFSET(ktk_variant, weight_size, 48);
OFFSET(ktk_variant, pack_weight, 56);
OFFSET(ktk_variant, source_size, 64);
OFFSET(ktk_variant, pack_sized, 72);
OFFSET(ktk_variant, unpack_weight, 80);
OFFSET(ktk_variant, weight_offset, 88);
OFFSET(ktk_variant, export_weight, 96);
OFFSET(ktk_variant, is_packed, 104);
OFFSET(ktk_variant, act, 112);
OFFSET(ktk_variant, act_format, 136);
OFFSET(ktk_variant, act_size, 144);
OFFSET(ktk_variant, pack_act, 152);
OFFSET(ktk_variant, unpack_act, 160);
OFFSET(ktk_variant, ukernels, 168);
OFFSET(ktk_variant, num_ukernels, 176);
OFFSET(ktk_variant, enter, 184);
OFFSET(ktk_variant, leave, 192);

static_assert(sizeof(ktk_accept) == 24);
OFFSET(ktk_accept, given, 0);
OFFSET(ktk_accept, stored, 20);

static_assert(sizeof(ktk_backend) == 72);
OFFSET(ktk_backend, struct_size, 0);
OFFSET(ktk_backend, abi_major, 8);
OFFSET(ktk_backend, abi_minor, 12);
OFFSET(ktk_backend, name, 16);
OFFSET(ktk_backend, formats, 24);
OFFSET(ktk_backend, num_formats, 32);
OFFSET(ktk_backend, accepts, 40);
OFFSET(ktk_backend, num_accepts, 48);
OFFSET(ktk_backend, variants, 56);
OFFSET(ktk_backend, num_variants, 64);

// Asserted by the compiler; the test is here so that a run shows that it was compiled.
TEST(the_layout_of_the_abi_is_as_published) {
  CHECK_EQ(std::string(KTK_CAPSULE_NAME), "ktk.backend");
}
