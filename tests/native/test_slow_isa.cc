// What a CPU has and is faster without.
#include <cstdlib>

#include "check.h"
#include "core/slow_isa.h"

namespace {

using ktk::CpuId;
using ktk::slow_isa;

constexpr ktk_isa kBf16 = KTK_ISA_AVX2 | KTK_ISA_AVX512 | KTK_ISA_AVX512_VNNI | KTK_ISA_AVX512_BF16;
const CpuId kZen4{"AuthenticAMD", 0x19, 0x11}, kCooperLake{"GenuineIntel", 6, 85};
const CpuId kSapphireRapids{"GenuineIntel", 6, 143}, kEmeraldRapids{"GenuineIntel", 6, 207};

TEST(f32_products_are_faster_than_bf16_where_intel_has_no_tiles) {
  CHECK_EQ(slow_isa(kSapphireRapids, kBf16), KTK_ISA_AVX512_BF16);
  CHECK_EQ(slow_isa(kEmeraldRapids, kBf16), KTK_ISA_AVX512_BF16);
  CHECK_EQ(slow_isa(kEmeraldRapids, kBf16 | KTK_ISA_AMX_INT8 | KTK_ISA_AMX_BF16), KTK_ISA_NONE);
}

TEST(what_a_cpu_may_not_use_is_not_slow) {
  CHECK_EQ(slow_isa(kEmeraldRapids, kBf16 & ~KTK_ISA_AVX512_BF16), KTK_ISA_NONE);
}

TEST(other_cpus_use_all_they_have) {
  CHECK_EQ(slow_isa(kZen4, kBf16), KTK_ISA_NONE);
  CHECK_EQ(slow_isa(kCooperLake, kBf16), KTK_ISA_NONE);
  CHECK_EQ(slow_isa({}, kBf16), KTK_ISA_NONE);
}

#if defined(__x86_64__)
TEST(a_set_that_a_variable_names_is_not_slow) {
  setenv("KTK_ISA", "avx512_bf16", 1);
  CHECK_EQ(ktk::named_isa(), KTK_ISA_AVX512_BF16);
  CHECK_EQ(slow_isa(), KTK_ISA_NONE);
  setenv("KTK_ISA", "avx512_fp16", 1);
  CHECK_EQ(ktk::named_isa(), KTK_ISA_AVX512_FP16);
  CHECK_EQ(slow_isa(), slow_isa(ktk::cpu_id(), ktk::allowed_isa()));
  unsetenv("KTK_ISA");
  setenv("KTK_ISA_FORCE", "amx_int8,avx512_bf16", 1);
  CHECK_EQ(ktk::named_isa(), KTK_ISA_AMX_INT8 | KTK_ISA_AVX512_BF16);
  unsetenv("KTK_ISA_FORCE");
  CHECK_EQ(ktk::named_isa(), KTK_ISA_NONE);
}
#endif

}  // namespace
