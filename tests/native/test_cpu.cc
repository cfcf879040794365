#include <cstdlib>

#include "check.h"
#include "core/cpu.h"

using ktk::allowed_isa;
using ktk::capped_isa;
using ktk::detected_isa;
using ktk::isa_names;

namespace {

// Sets a variable for the life of the object.
class Setting {
 public:
  Setting(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Setting() { unsetenv(name_); }

 private:
  const char* name_;
};

ktk_isa allowed_with(const char* cap, const char* force = "") {
  const Setting capped("KTK_ISA", cap), forced("KTK_ISA_FORCE", force);
  return allowed_isa();
}

constexpr ktk_isa kAmx = KTK_ISA_AMX_INT8 | KTK_ISA_AMX_BF16;

}  // namespace

TEST(names_are_in_the_order_of_the_abi) {
  CHECK_EQ(isa_names(KTK_ISA_NONE), {});
  CHECK_EQ(isa_names(KTK_ISA_AMX_BF16 | KTK_ISA_AVX2 | KTK_ISA_AVX512_VNNI),
           (std::vector<std::string>{"avx2", "avx512_vnni", "amx_bf16"}));
  CHECK_EQ(isa_names(KTK_ISA_SVE | KTK_ISA_NEON), (std::vector<std::string>{"neon", "sve"}));
  CHECK_EQ(isa_names(~ktk_isa{0}).size(), 64u);
  CHECK_EQ(isa_names(ktk_isa{1} << 40), {"bit 40"});
}

TEST(every_set_has_a_name_and_a_cap_that_leaves_it) {
#define CHECK_SET(bit, name, compiler, extends, with, cpu)                 \
  CHECK_EQ(isa_names(KTK_ISA_##bit), {#name});                             \
  CHECK_EQ(ktk::isa_bit::name, KTK_ISA_##bit);                             \
  CHECK_EQ(capped_isa(~ktk_isa{0}, #name) & KTK_ISA_##bit, KTK_ISA_##bit); \
  CHECK_EQ(capped_isa(~ktk_isa{0}, #name) & ((extends) | (with)), (extends) | (with));
  KTK_ISA_HERE(CHECK_SET)
#undef CHECK_SET
}

TEST(what_is_detected_comes_with_what_it_extends) {
  const ktk_isa isa = detected_isa();
#define CHECK_SET(bit, name, compiler, extends, with, cpu) \
  if (isa & KTK_ISA_##bit) CHECK_EQ(isa&(extends), (extends));
  KTK_ISA_HERE(CHECK_SET)
#undef CHECK_SET
}

TEST(the_model_has_a_name_without_spaces_around_it) {
  const std::string name = ktk::cpu_model_name();
  CHECK(!name.empty());
  CHECK(name.front() != ' ' && name.back() != ' ');
  CHECK(name.find('\0') == std::string::npos);
}

TEST(without_a_cap_all_that_is_detected_is_allowed) {
  unsetenv("KTK_ISA");
  CHECK_EQ(allowed_isa(), detected_isa());
  CHECK_EQ(allowed_with(""), detected_isa());
}

TEST(an_unknown_cap_is_refused_by_name) {
  for (const char* value : {"avx", "AVX2", "avx512,amx", "none", "42"}) {
    const std::string is = "is '" + std::string(value) + "'";
    CHECK(CHECK_THROWS(ktk::SettingError, allowed_with(value)).starts_with("KTK_ISA " + is));
    const std::string forced = CHECK_THROWS(ktk::SettingError, allowed_with("", value));
    CHECK(forced.starts_with("KTK_ISA_FORCE " + is));
  }
}

#if defined(__x86_64__)

// The compiler's own detection asks CPUID and XGETBV too, in code that is not ours. It knows
// nothing of the permission for AMX, so AMX is left out.
TEST(the_compiler_sees_the_same_cpu) {
  const ktk_isa isa = detected_isa();
  const bool avx2 = __builtin_cpu_supports("x86-64-v3");
  const bool avx512 = __builtin_cpu_supports("x86-64-v4");
  CHECK_EQ((isa & KTK_ISA_AVX2) != 0, avx2);
  CHECK_EQ((isa & KTK_ISA_AVX512) != 0, avx512);
  CHECK_EQ((isa & KTK_ISA_AVX512_VNNI) != 0, avx512 && __builtin_cpu_supports("avx512vnni"));
  CHECK_EQ((isa & KTK_ISA_AVX512_BF16) != 0, avx512 && __builtin_cpu_supports("avx512bf16"));
  CHECK_EQ((isa & KTK_ISA_AVX512_VBMI) != 0,
           avx512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni"));
}

// CPUs as they are sold.
constexpr ktk_isa kHaswell = KTK_ISA_AVX2;
constexpr ktk_isa kAlderLake = kHaswell | KTK_ISA_AVX_VNNI;
constexpr ktk_isa kSkylake = kHaswell | KTK_ISA_AVX512;
constexpr ktk_isa kCascadeLake = kSkylake | KTK_ISA_AVX512_VNNI;
constexpr ktk_isa kCooperLake = kCascadeLake | KTK_ISA_AVX512_BF16;
constexpr ktk_isa kZen5 = kCooperLake | KTK_ISA_AVX512_VBMI | KTK_ISA_AVX_VNNI;
constexpr ktk_isa kSapphireRapids = kZen5 | KTK_ISA_AVX512_FP16 | kAmx;

TEST(a_cap_makes_a_new_cpu_an_older_one) {
  for (ktk_isa cpu : {kZen5, kSapphireRapids}) {
    CHECK_EQ(isa_names(capped_isa(cpu, "avx2")), isa_names(kHaswell));
    CHECK_EQ(isa_names(capped_isa(cpu, "avx_vnni")), isa_names(kAlderLake));
    CHECK_EQ(isa_names(capped_isa(cpu, "avx512")), isa_names(kSkylake));
    CHECK_EQ(isa_names(capped_isa(cpu, "avx512_vnni")), isa_names(kCascadeLake));
    CHECK_EQ(isa_names(capped_isa(cpu, "avx512_bf16")), isa_names(kCooperLake));
  }
  CHECK_EQ(capped_isa(kSapphireRapids, "amx"), kSapphireRapids);
}

TEST(a_cap_above_the_cpu_adds_nothing) {
  CHECK_EQ(isa_names(capped_isa(kHaswell, "avx512_bf16")), isa_names(kHaswell));
  CHECK_EQ(isa_names(capped_isa(kAlderLake, "avx512_fp16")), isa_names(kHaswell));
  CHECK_EQ(isa_names(capped_isa(kCascadeLake, "avx512_bf16")), isa_names(kCascadeLake));
}

TEST(a_cap_never_adds_amx) {
  for (const char* cap : {"amx", "amx_int8", "amx_bf16"}) {
    CHECK_EQ(isa_names(capped_isa(kZen5, cap)), isa_names(kZen5));
    CHECK_EQ(allowed_with(cap) & ~detected_isa(), KTK_ISA_NONE);
  }
  CHECK_EQ(isa_names(capped_isa(kSapphireRapids, "amx_int8") & kAmx),
           (std::vector<std::string>{"amx_int8"}));
}

TEST(forcing_adds_the_named_sets_and_no_other) {
  CHECK_EQ(isa_names(ktk::forced_isa("amx_int8")), {"amx_int8"});
  CHECK_EQ(isa_names(ktk::forced_isa("amx_bf16")), {"amx_bf16"});
  CHECK_EQ(ktk::forced_isa("amx"), kAmx);
  CHECK_EQ(CHECK_THROWS(ktk::SettingError, ktk::forced_isa("avx512")),
           "KTK_ISA_FORCE is 'avx512'; expected some of avx_vnni, avx512_vnni, avx512_bf16, "
           "avx512_vbmi, avx512_fp16, amx_int8, amx_bf16, or amx, with commas between them");
  CHECK_EQ(ktk::forced_isa("amx,avx512_bf16"), kAmx | KTK_ISA_AVX512_BF16);
  for (const char* value : {"amx,", ",amx", "amx,,avx_vnni", "amx, avx_vnni", "avx2"}) {
    CHECK_THROWS(ktk::SettingError, ktk::forced_isa(value));
  }
  CHECK_EQ(allowed_with("", "amx"), detected_isa() | kAmx);
  CHECK_EQ(allowed_with("avx2", "amx"), detected_isa() & KTK_ISA_AVX2);  // the cap comes last
  CHECK_EQ(allowed_with("amx_int8", "amx") & kAmx, KTK_ISA_AMX_INT8);
}

TEST(the_environment_is_read_at_every_call) {
  CHECK_EQ(allowed_with("avx2"), detected_isa() & KTK_ISA_AVX2);
  CHECK_EQ(allowed_isa(), detected_isa());
}

TEST(names_of_another_architecture_are_unknown) {
  CHECK_THROWS(ktk::SettingError, allowed_with("neon"));
}

#elif defined(__aarch64__)

TEST(a_cap_makes_a_new_cpu_an_older_one) {
  constexpr ktk_isa v80 = KTK_ISA_NEON, v82 = v80 | KTK_ISA_DOTPROD;
  constexpr ktk_isa v86 = v82 | KTK_ISA_I8MM | KTK_ISA_ARM_BF16, all = v86 | KTK_ISA_SVE;
  CHECK_EQ(isa_names(capped_isa(all, "neon")), isa_names(v80));
  CHECK_EQ(isa_names(capped_isa(all, "dotprod")), isa_names(v82));
  CHECK_EQ(isa_names(capped_isa(all, "i8mm")), isa_names(v86));
  CHECK_EQ(isa_names(capped_isa(v82, "sve")), isa_names(v82));
  CHECK_EQ(allowed_with("neon"), detected_isa() & KTK_ISA_NEON);
}

#endif
