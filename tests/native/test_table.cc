// What the core makes of a backend's table, and of one that was built against an older header.
#include <cstddef>
#include <cstring>
#include <vector>

#include "a_table.h"
#include "check.h"
#include "core/worker_pool.h"
#include "format/format.h"
#include "moe/table_check.h"
#include "moe/weights.h"

namespace {

bool same(const ktk_format& a, const ktk_format& b) { return ktk::same_format(a, b, 1, 256); }

TEST(activations_follow_the_weight_they_meet) {
  const auto table = table_of(kVariant);
  const ktk::Variant& variant = table->select("");
  CHECK(same(variant.act_of({1, 32, kQ8}), kActI8));
  CHECK(same(variant.act_of({1, 32, kF32}), kF32));
}

TEST(a_table_of_a_later_minor_has_fields_behind_those_of_this_one) {
  struct {
    ktk_variant known = kVariant;
    void (*appended)() = nullptr;
  } later;
  later.known.struct_size = sizeof later;
  const auto table = table_of(later.known);
  CHECK_EQ(table->select("").struct_size, sizeof(ktk_variant));
}

TEST(a_table_of_this_minor_lacks_what_a_later_one_appends) {
  struct Later : ktk_variant {
    void (*appended)();
  };
  Later table = {kVariant, [] {}};  // of this minor, and something behind it
  CHECK(ktk::copy_struct("TEST", &table).appended == nullptr);
  table.struct_size = sizeof table;
  const Later copy = ktk::copy_struct("TEST", &table);
  CHECK(copy.appended == table.appended);
}

// As of a micro-kernel that says nothing of rows it does not take.
size_t scratch_of_few(const ktk_matrix*, size_t m) { return m <= 8 ? 64 * m : 0; }

TEST(a_micro_kernel_is_asked_for_no_more_rows_than_it_takes) {
  ktk_ukernel kernels[] = {kKernel, kKernel};
  kernels[0].m_max = 8;
  kernels[0].scratch_size = scratch_of_few;
  ktk_variant variant = kVariant;
  variant.ukernels = kernels;
  variant.num_ukernels = 2;
  const auto table = table_of(variant);
  const ktk::Variant& v = table->select("");
  CHECK_EQ(v.scratch_bytes(v.kernels[0], {16, 32, kF32}, 512), 512u);
  CHECK_EQ(v.scratch_bytes(v.kernels[0], {16, 32, kF32}, 4), 256u);
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

// As many bytes as the first weight of a range says, which are filled with it.
size_t size_of_first(const ktk_matrix*, const ktk_source* source, size_t n_begin, size_t) {
  const char* row = static_cast<const char*>(source->data) + n_begin * source->data_stride;
  return static_cast<size_t>(*reinterpret_cast<const float*>(row));
}
void fill(const ktk_matrix*, const ktk_source*, size_t n_begin, size_t, void* packed,
          size_t bytes) {
  if (n_begin == 0) std::memset(packed, static_cast<int>(bytes / 64), bytes);
}

TEST(an_expert_that_takes_more_bytes_than_others_has_memory_of_its_own) {
  ktk_variant variant = kVariant;
  variant.source_size = size_of_first;
  variant.pack_sized = fill;
  const auto table = table_of(variant);
  const ktk::Config config{.num_experts = 3, .top_k = 1, .hidden = 64, .intermediate = 64};
  std::vector<float> few(64 * 64, 64.0f), many = few;
  many[32 * 64] = 640.0f;  // in the second range of rows
  const auto matrix = [](const std::vector<float>& of) {
    return ktk_source{kF32, of.data(), nullptr, nullptr, 64 * sizeof(float), 0, 0};
  };
  ktk::ExpertSource small{};
  small.gate = small.up = small.down = matrix(few);
  ktk::ExpertSource large = small;
  large.up = matrix(many);
  ktk::WorkerPool pool({.threads = 1, .cpus = {}, .pin = false});
  ktk::Weights weights(config, table->select(""), {kF32, kF32, kF32}, small, {-1});
  for (size_t e = 0; e < 3; ++e) weights.load(e, e == 1 ? large : small, pool);
  const ktk::Slice& slice = weights.slices()[0];
  const auto holds = [&](size_t expert, int gate, int up, int down) {
    const char *at = slice.gate_at(expert), *up_at = slice.up_at(expert),
               *down_at = slice.down_at(expert);
    CHECK_EQ(up_at - at, gate * 64);
    CHECK_EQ(down_at - up_at, up * 64);
    CHECK(at[0] == gate && up_at[0] == up && down_at[0] == down && down_at[down * 64 - 1] == down);
  };
  const auto have = [&](size_t own) {
    holds(0, 1, 1, 1);
    holds(2, 1, 1, 1);
    holds(1, 1, own ? 10 : 1, 1);
    CHECK((slice.own_of(1) != nullptr) == (own != 0));
    CHECK_EQ(weights.bytes(), 9 * 64 + own);
    CHECK_EQ(weights.expert_bytes(), 3u * 64);
  };
  have(9 * 64);
  weights.load(1, small, pool);
  have(0);
  weights.load(1, large, pool);
  have(9 * 64);
  weights.discard(1, ktk::Weights::State::kLeftOut);
  CHECK_EQ(weights.bytes(), 6u * 64);
  CHECK(!slice.own_of(1));
}

TEST(shards_of_down_are_whole_blocks) {
  const auto table = table_of(kVariant);
  const ktk::Config config{.num_experts = 1, .top_k = 1, .hidden = 256, .intermediate = 768};
  ktk::ExpertSource source{};
  source.gate.format = source.up.format = kQ8;
  source.down.format = kQ4;
  const ktk::Weights weights(config, table->select(""), {kQ8, kQ8, kQ4}, source, {-1, -1});
  CHECK_EQ(weights.slices().size(), 2u);
  for (const ktk::Slice& slice : weights.slices()) CHECK_EQ(slice.begin % 256, 0u);
  CHECK_THROWS(std::invalid_argument,
               ktk::Weights(config, table->select(""), {kQ8, kQ8, kQ4}, source, {-1, -1, -1, -1}));
}

TEST(later_experts_must_fit_the_cuts_of_the_first) {
  const auto table = table_of(kVariant);
  const ktk::Config config{.num_experts = 1, .top_k = 1, .hidden = 32, .intermediate = 384};
  ktk::WorkerPool pool({.threads = 1, .cpus = {}, .pin = false});
  ktk::ExpertSource source{};
  source.gate.format = source.up.format = source.down.format = kF32;
  ktk::Weights weights(config, table->select(""), {kF32, kF32, kF32}, source, {-1, -1, -1, -1});
  weights.load(0, source, pool);  // cut at 96, 192 and 288
  // Floats have no groups to cut slices at, and these ones reach over groups of 128.
  for (ktk_source ktk::ExpertSource::* part :
       {&ktk::ExpertSource::gate, &ktk::ExpertSource::up, &ktk::ExpertSource::down}) {
    ktk::ExpertSource later = source;
    (later.*part).format = {KTK_I8, KTK_F32, KTK_NONE, 32, 32};
    weights.load(0, later, pool);
    (later.*part).format = {KTK_I8, KTK_F32, KTK_NONE, 128, 128};
    CHECK_THROWS(std::invalid_argument, weights.load(0, later, pool));
  }
}

}  // namespace
