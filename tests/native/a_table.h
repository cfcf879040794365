// A backend's table that breaks no rule, for tests to change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>

#include "moe/table.h"

namespace {

size_t size_of(const ktk_matrix*) { return KTK_ALIGNMENT; }
size_t size_of_act(const ktk_matrix* matrix) {
  return matrix->format.element == KTK_F32 ? 2 * KTK_ALIGNMENT : KTK_ALIGNMENT;
}
void pack(const ktk_matrix*, const ktk_source*, size_t, size_t, void*) {}
void unpack(const ktk_matrix*, const void*, size_t, size_t, float*, size_t) {}
void pack_act(const ktk_matrix*, size_t, size_t, size_t, const float*, size_t, void*, size_t) {}
void unpack_act(const ktk_matrix*, size_t, const void*, size_t, float*, size_t) {}
void run(const ktk_matmul*) {}

constexpr ktk_format kF32 = {KTK_F32, KTK_NONE, KTK_NONE, 0, 0};
constexpr ktk_format kQ8 = {KTK_GGML + 8, KTK_NONE, KTK_NONE, 1, 32};
constexpr ktk_format kQ4 = {KTK_GGML + 12, KTK_NONE, KTK_NONE, 1, 256};
constexpr ktk_format kActI8 = {KTK_I8, KTK_F32, KTK_NONE, 1, 32};

void act_format(const ktk_matrix* matrix, ktk_format* format) {
  *format = matrix->format.element == KTK_F32 ? kF32 : kActI8;
}

constexpr ktk_ukernel kKernel = {sizeof(ktk_ukernel), "any", SIZE_MAX, nullptr, run};
constexpr ktk_variant kVariant = {
    .struct_size = sizeof(ktk_variant),
    .name = "any",
    .required_isa = KTK_ISA_NONE,
    .tile = {1, 16, 32},
    .layout = "any",
    .weight_size = size_of,
    .pack_weight = pack,
    .source_size = nullptr,
    .pack_sized = nullptr,
    .unpack_weight = unpack,
    .weight_offset = nullptr,
    .export_weight = nullptr,
    .is_packed = nullptr,
    .act = kActI8,
    .act_format = act_format,
    .act_size = size_of_act,
    .pack_act = pack_act,
    .unpack_act = unpack_act,
    .ukernels = &kKernel,
    .num_ukernels = 1,
    .enter = nullptr,
    .leave = nullptr,
};
constexpr ktk_format kFormats[] = {kQ8, kQ4, kF32};
constexpr ktk_accept kAccepts[] = {{kQ8, 0}, {kQ4, 1}, {kF32, 2}};

ktk_backend backend_of(const ktk_variant* const* variant) {
  return {
      .struct_size = sizeof(ktk_backend),
      .abi_major = KTK_ABI_MAJOR,
      .abi_minor = 0,
      .name = "TEST",
      .formats = kFormats,
      .num_formats = std::size(kFormats),
      .accepts = kAccepts,
      .num_accepts = std::size(kAccepts),
      .variants = variant,
      .num_variants = 1,
  };
}

std::shared_ptr<ktk::BackendTable> table_of(const ktk_variant& variant) {
  const ktk_variant* const variants[] = {&variant};
  const ktk_backend backend = backend_of(variants);
  return ktk::BackendTable::copy(&backend);
}

}  // namespace
