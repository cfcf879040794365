// What the core makes of a backend's table, and of one that was built against an older header.
#include <cstddef>

#include "check.h"
#include "moe/table.h"
#include "moe/weights.h"

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
    .act = kActI8,
    .layout = "any",
    .weight_size = size_of,
    .pack_weight = pack,
    .unpack_weight = unpack,
    .act_size = size_of_act,
    .pack_act = pack_act,
    .unpack_act = unpack_act,
    .ukernels = &kKernel,
    .num_ukernels = 1,
    .enter = nullptr,
    .leave = nullptr,
    .weight_offset = nullptr,
    .act_format = act_format,
};
constexpr ktk_format kFormats[] = {kQ8, kQ4, kF32};
constexpr ktk_accept kAccepts[] = {{kQ8, 0}, {kQ4, 1}, {kF32, 2}};

std::shared_ptr<ktk::BackendTable> table_of(const ktk_variant& variant) {
  const ktk_variant* const variants[] = {&variant};
  const ktk_backend backend = {
      .struct_size = sizeof(ktk_backend),
      .abi_major = KTK_ABI_MAJOR,
      .abi_minor = 0,
      .name = "TEST",
      .formats = kFormats,
      .num_formats = std::size(kFormats),
      .accepts = kAccepts,
      .num_accepts = std::size(kAccepts),
      .variants = variants,
      .num_variants = 1,
  };
  return ktk::BackendTable::copy(&backend);
}

bool same(const ktk_format& a, const ktk_format& b) { return ktk::same_format(a, b, 1, 256); }

TEST(activations_follow_the_weight_they_meet) {
  const auto table = table_of(kVariant);
  const ktk::Variant& variant = table->select("");
  CHECK(same(variant.act_of({1, 32, kQ8}), kActI8));
  CHECK(same(variant.act_of({1, 32, kF32}), kF32));
}

TEST(a_table_of_abi_1_0_ends_before_act_format) {
  ktk_variant old = kVariant;
  old.struct_size = offsetof(ktk_variant, act_format);
  const auto table = table_of(old);  // what is behind it is not the table's
  CHECK(same(table->select("").act_of({1, 32, kF32}), kActI8));
  old.struct_size -= sizeof(void*);
  CHECK_THROWS(std::invalid_argument, table_of(old));
}

TEST(gate_and_up_share_activations_of_one_format) {
  const auto table = table_of(kVariant);
  const ktk::Variant& variant = table->select("");
  CHECK(variant.share_acts({1, 256, kQ4}, {1, 256, kQ8}));
  CHECK(variant.share_acts({1, 256, kF32}, {1, 256, kF32}));
  CHECK(!variant.share_acts({1, 256, kQ4}, {1, 256, kF32}));
}

TEST(without_act_format_equal_weights_alone_share_activations) {
  ktk_variant old = kVariant;
  old.act_format = nullptr;
  const auto table = table_of(old);
  const ktk::Variant& variant = table->select("");
  CHECK(variant.share_acts({1, 256, kQ4}, {1, 256, kQ4}));
  CHECK(!variant.share_acts({1, 256, kQ4}, {1, 256, kQ8}));
}

TEST(shards_of_down_are_whole_blocks) {
  const auto table = table_of(kVariant);
  const ktk::Config config{.num_experts = 1, .top_k = 1, .hidden = 256, .intermediate = 768};
  ktk::ExpertSource source{};
  source.gate.format = source.up.format = kQ8;
  source.down.format = kQ4;
  const ktk::Weights weights(config, table->select(""), {kQ8, kQ8, kQ4}, source, {-1, -1});
  for (const ktk::Shard& shard : weights.shards()) CHECK_EQ(shard.begin % 256, 0u);
  CHECK_THROWS(std::invalid_argument,
               ktk::Weights(config, table->select(""), {kQ8, kQ8, kQ4}, source, {-1, -1, -1, -1}));
}

}  // namespace
