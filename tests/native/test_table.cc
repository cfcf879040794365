// What the core makes of a backend's table, and of one that was built against an older header.
#include <cstddef>

#include "a_table.h"
#include "check.h"
#include "core/worker_pool.h"
#include "format/format.h"
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
  later.known.struct_size = sizeof(ktk_variant) - sizeof(void*);
  CHECK_THROWS(std::invalid_argument, table_of(later.known));
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
