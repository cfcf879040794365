#include <cstdlib>

#include "check.h"
#include "core/cpu.h"

using ktk::allowed_isa;
using ktk::detected_isa;
using ktk::isa_names;

namespace {

// Sets KTK_ISA for the life of the object.
class Cap {
 public:
  explicit Cap(const char* value) { setenv("KTK_ISA", value, 1); }
  ~Cap() { unsetenv("KTK_ISA"); }
};

ktk_isa allowed_with(const char* value) {
  const Cap cap(value);
  return allowed_isa();
}

constexpr ktk_isa kAmx = KTK_ISA_AMX_INT8 | KTK_ISA_AMX_BF16;

}  // namespace

TEST(names_are_in_the_order_of_the_abi) {
  CHECK_EQ(isa_names(KTK_ISA_NONE), {});
  CHECK_EQ(isa_names(KTK_ISA_AMX_BF16 | KTK_ISA_AVX2 | KTK_ISA_AVX512_VNNI),
           (std::vector<std::string>{"avx2", "avx512_vnni", "amx_bf16"}));
  CHECK_EQ(isa_names(KTK_ISA_SVE | KTK_ISA_NEON), (std::vector<std::string>{"neon", "sve"}));
  CHECK_EQ(isa_names(~ktk_isa{0}).size(), 14u);
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
    const Cap cap(value);
    const std::string message = CHECK_THROWS(std::invalid_argument, allowed_isa());
    CHECK(message.find(std::string(value).insert(0, 1, '\'') + '\'') != std::string::npos);
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
  CHECK_EQ((isa & KTK_ISA_AVX512_VBMI) != 0, avx512 && __builtin_cpu_supports("avx512vbmi"));
}

TEST(a_cap_allows_the_levels_below_it_and_nothing_above) {
  const ktk_isa avx512 = KTK_ISA_AVX2 | KTK_ISA_AVX512;
  const struct {
    const char* cap;
    ktk_isa allows;
  } rows[] = {
      {"avx2", KTK_ISA_AVX2},
      {"avx_vnni", KTK_ISA_AVX2 | KTK_ISA_AVX_VNNI},
      {"avx512", avx512},
      {"avx512_vnni", avx512 | KTK_ISA_AVX512_VNNI},
      {"avx512_bf16", avx512 | KTK_ISA_AVX512_VNNI | KTK_ISA_AVX512_BF16},
  };
  for (const auto& row : rows) {
    CHECK_EQ(isa_names(allowed_with(row.cap)), isa_names(row.allows & detected_isa()));
  }
}

TEST(a_cap_to_amx_switches_on_the_named_sets_and_no_other) {
  CHECK_EQ(isa_names(allowed_with("amx_int8") & kAmx), (std::vector<std::string>{"amx_int8"}));
  CHECK_EQ(isa_names(allowed_with("amx_bf16") & kAmx), (std::vector<std::string>{"amx_bf16"}));
  CHECK_EQ(allowed_with("amx") & kAmx, kAmx);
  CHECK_EQ(isa_names(allowed_with("amx") & ~kAmx), isa_names(detected_isa() & ~kAmx));
}

TEST(names_of_another_architecture_are_unknown) {
  const Cap cap("neon");
  CHECK_THROWS(std::invalid_argument, allowed_isa());
}

#elif defined(__aarch64__)

TEST(a_cap_allows_the_levels_below_it_and_nothing_above) {
  CHECK_EQ(isa_names(allowed_with("neon")), (std::vector<std::string>{"neon"}));
  CHECK_EQ(allowed_with("dotprod"), detected_isa() & (KTK_ISA_NEON | KTK_ISA_DOTPROD));
}

#endif
