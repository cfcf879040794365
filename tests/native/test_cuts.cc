// Where the intermediate size is cut, for every size and number of shards that a model may have.
#include <algorithm>

#include "check.h"
#include "moe/cuts.h"

namespace {

using ktk::cut_shards;
using ktk::cut_slices;
using ktk::CutRules;
using ktk::most_shards;
using Cuts = std::vector<size_t>;

const CutRules kRules[] = {
    {.block = 1, .step = 32, .groups = {}},             // BF16
    {.block = 1, .step = 512, .groups = {}},            // AMXINT8
    {.block = 1, .step = 128, .groups = {128}},         // FP8
    {.block = 2, .step = 128, .groups = {128, 32}},     // AMXINT4
    {.block = 2, .step = 96, .groups = {48, 80, 112}},  // nobody
    {.block = 64, .step = 64, .groups = {}},            // NVFP4 of ggml
    {.block = 256, .step = 64, .groups = {}},           // Q4_K
    {.block = 1, .step = size_t{4096} * 65521, .groups = {4294967291, 4294967279}},
};

TEST(shards_are_about_equally_wide) {
  for (const CutRules& rules : kRules) {
    const size_t unit = std::max<size_t>(rules.block, 32);
    for (size_t extent = 32; extent <= 4096; extent += 32) {
      const size_t units = (extent + unit - 1) / unit;
      CHECK_EQ(most_shards(extent, rules), units);
      for (size_t shards = 1; shards <= std::min<size_t>(units, 9); ++shards) {
        const Cuts cuts = cut_shards(extent, shards, rules);
        CHECK_EQ(cuts.size(), shards + 1);
        CHECK_EQ(cuts.front(), 0u);
        CHECK_EQ(cuts.back(), extent);
        size_t widest = 0, narrowest = extent;
        for (size_t s = 0; s < shards; ++s) {
          CHECK(cuts[s] < cuts[s + 1] && cuts[s] % unit == 0);
          widest = std::max(widest, cuts[s + 1] - cuts[s]);
          narrowest = std::min(narrowest, cuts[s + 1] - cuts[s]);
        }
        CHECK(widest <= (units + shards - 1) / shards * unit);
        if (unit <= 64) CHECK(widest - narrowest <= 64);
      }
    }
  }
}

TEST(coarse_steps_are_kept_where_they_cost_nothing) {
  CHECK_EQ(cut_shards(2048, 2, kRules[1]), (Cuts{0, 1024, 2048}));
  CHECK_EQ(cut_shards(768, 2, kRules[1]), (Cuts{0, 384, 768}));
  CHECK_EQ(cut_shards(768, 4, kRules[1]), (Cuts{0, 192, 384, 576, 768}));
  CHECK_EQ(cut_shards(512, 3, kRules[1]), (Cuts{0, 128, 320, 512}));
  CHECK_EQ(cut_shards(1408, 4, kRules[2]), (Cuts{0, 352, 704, 1056, 1408}));
  CHECK_EQ(cut_shards(1536, 4, kRules[2]), (Cuts{0, 384, 768, 1152, 1536}));
}

TEST(a_slice_starts_with_its_groups_or_lies_within_one) {
  CHECK_EQ(cut_slices(0, 192, {128}), (Cuts{0, 192}));
  CHECK_EQ(cut_slices(192, 384, {128}), (Cuts{192, 256, 384}));
  CHECK_EQ(cut_slices(32, 96, {128}), (Cuts{32, 96}));
  CHECK_EQ(cut_slices(96, 768, {128, 192}), (Cuts{96, 128, 192, 256, 384, 768}));
  const Cuts groups = {48, 80, 128};
  for (size_t begin = 0; begin < 1000; begin += 32) {
    const Cuts cuts = cut_slices(begin, 2048, groups);
    CHECK(cuts.front() == begin && cuts.back() == 2048);
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      for (const size_t group : groups) {
        CHECK(cuts[i] % group == 0 || cuts[i] / group == (cuts[i + 1] - 1) / group);
      }
    }
  }
}

}  // namespace
