// How weights are fetched: the row of a CPU, and what KTK_PREFETCH makes of it.
#include "check.h"
#include "core/cpu.h"
#include "core/prefetch.h"

namespace {

using ktk::describe;
using ktk::prefetch_for;

constexpr ktk_isa kAvx512 = KTK_ISA_AVX2 | KTK_ISA_AVX512;
const ktk::CpuId kZen5{"AuthenticAMD", 0x1a, 2}, kZen4{"AuthenticAMD", 0x19, 0x11};
const ktk::CpuId kSapphireRapids{"GenuineIntel", 6, 143}, kEmeraldRapids{"GenuineIntel", 6, 207};

std::string setting(const ktk::CpuId& cpu, ktk_isa isa, const char* text) {
  return describe(prefetch_for(cpu, isa, text));
}

TEST(a_cpu_has_its_row) {
  CHECK_EQ(prefetch_for(kZen5, kAvx512, "").few.cache, 1);
  CHECK_EQ(prefetch_for(kZen4, kAvx512, "").few.cache, 2);
  CHECK(setting(kZen5, kAvx512, "") == setting(kZen4, kAvx512, "zen5"));
}

TEST(intel_has_a_row_where_amx_may_be_used_and_one_without) {
  const ktk_isa amx = kAvx512 | KTK_ISA_AMX_INT8 | KTK_ISA_AMX_BF16;
  CHECK_EQ(std::string(ktk::prefetch_row(kSapphireRapids, amx)), "intel_amx");
  CHECK_EQ(std::string(ktk::prefetch_row(kEmeraldRapids, amx)), "intel_amx");
  CHECK_EQ(std::string(ktk::prefetch_row(kSapphireRapids, kAvx512)), "intel");
  CHECK_EQ(std::string(ktk::prefetch_row(kEmeraldRapids, kAvx512)), "intel");
  CHECK_EQ(std::string(ktk::prefetch_row(kSapphireRapids, KTK_ISA_AVX2)), "default");
  CHECK_EQ(prefetch_for(kSapphireRapids, amx, "").many.order, KTK_FETCH_BY_PAGES);
  CHECK_EQ(prefetch_for(kSapphireRapids, kAvx512, "").few.order, KTK_FETCH_BY_PAGES);
  CHECK_EQ(prefetch_for(kSapphireRapids, kAvx512, "").pair.order, KTK_FETCH_BY_PAGES);
}

TEST(a_cpu_whose_products_take_longer_has_more_sums) {
  const ktk::CpuId zen2{"AuthenticAMD", 0x17, 0x31}, zen3{"AuthenticAMD", 0x19, 1};
  CHECK_EQ(std::string(ktk::prefetch_row(zen2, KTK_ISA_AVX2)), "zen2");
  CHECK_EQ(prefetch_for(zen2, KTK_ISA_AVX2, "").accumulators, 10u);
  CHECK_EQ(prefetch_for(zen3, KTK_ISA_AVX2, "").accumulators, 8u);
  CHECK_EQ(std::string(ktk::prefetch_row({"AuthenticAMD", 0x17, 1}, KTK_ISA_AVX2)), "default");
}

TEST(a_row_has_a_name) {
  CHECK_EQ(std::string(ktk::prefetch_row(kZen5, kAvx512)), "zen5");
  CHECK_EQ(std::string(ktk::prefetch_row({}, KTK_ISA_NONE)), "default");
}

TEST(any_cpu_has_one) {
  CHECK(prefetch_for({}, KTK_ISA_NONE, "").few_products > 0);
  CHECK_EQ(prefetch_for({}, KTK_ISA_NONE, "").struct_size, sizeof(ktk_prefetch));
  CHECK_EQ(prefetch_for({}, KTK_ISA_NONE, "").l1_ahead, 2048u);
}

TEST(lines_may_go_to_one_cache_after_the_other) {
  const ktk_prefetch p = prefetch_for(kZen4, kAvx512, "few=8192:l2+l1");
  CHECK_EQ(p.few.cache, KTK_FETCH_L2_THEN_L1);
  CHECK(describe(p).find("few=8192:l2+l1,one=8192:l2,") == 0);
  CHECK(setting(kZen4, kAvx512, describe(p).c_str()) == describe(p));
}

TEST(entries_of_a_setting_take_the_place_of_those_of_the_cpu) {
  const ktk_prefetch p =
      prefetch_for(kZen4, kAvx512,
                   "few=4096:l1,many=32768:l2:pages,few_products=7,in_order_products=0,"
                   "pages_products=16,l1_ahead=1024,decode_rows=20,accumulators=12");
  CHECK_EQ(p.few.ahead, 4096u);
  CHECK_EQ(p.few.cache, 1);
  CHECK_EQ(p.many.order, KTK_FETCH_BY_PAGES);
  CHECK_EQ(p.few_products, 7u);
  CHECK_EQ(p.in_order_products, 0u);
  CHECK_EQ(p.pages_products, 16u);
  CHECK_EQ(p.l1_ahead, 1024u);
  CHECK_EQ(p.decode_rows, 20u);
  CHECK_EQ(p.accumulators, 12u);
  CHECK_EQ(p.one.ahead, prefetch_for(kZen4, kAvx512, "").one.ahead);
}

TEST(what_is_described_is_a_setting) {
  const std::string text =
      "few=1:l1,one=2:l2,pair=3:l1:pages,many=4:l2,decode=0:l2,few_products=5,in_order_products=6,"
      "pages_products=7,l1_ahead=8,decode_rows=9,accumulators=10";
  CHECK_EQ(setting(kZen5, kAvx512, text.c_str()), text);
}

TEST(nonsense_is_refused_by_name) {
  for (const char* text : {"zen9", "few", "few=", "few=1", "few=l1", "few=-1:l1", "few=1:l3",
                           "few=1:l1:", "few=1:l1:page", "few=4294967296:l1", "some=1:l1",
                           "few_products=x", "in_order_products=", "l1_ahead=-1", "zen5,", ","}) {
    CHECK_THROWS(ktk::SettingError, prefetch_for(kZen5, kAvx512, text));
  }
}

TEST(a_trial_changes_what_products_are_told_and_ends) {
  const std::string before = describe(ktk::prefetch());
  ktk::set_prefetch("few=64:l1");
  CHECK_EQ(ktk::prefetch().few.ahead, 64u);
  ktk::set_prefetch("");
  CHECK_EQ(describe(ktk::prefetch()), before);
}

}  // namespace
