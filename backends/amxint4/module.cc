// AMXINT4: 4-bit codes with a scale per group, made from floats or as GPTQ, AWQ and HQQ checkpoints
// hold them, zero points included.
#include "ktk/module.h"

namespace {

constexpr ktk_format floats(ktk_element element) { return {element, KTK_NONE, KTK_NONE, 0, 0}; }
constexpr ktk_format codes(ktk_element scale, ktk_element zero, uint32_t group_k) {
  return {KTK_U4, scale, zero, 1, group_k};
}

constexpr ktk_format kFormats[] = {
    // What floats become. The search of a zero point that need not be an integer finds a better
    // one.
    codes(KTK_BF16, KTK_NONE, 128),
    codes(KTK_BF16, KTK_NONE, 64),
    codes(KTK_BF16, KTK_NONE, 32),
    codes(KTK_BF16, KTK_NONE, 0),
    codes(KTK_BF16, KTK_BF16, 32),
    codes(KTK_BF16, KTK_BF16, 64),
    codes(KTK_BF16, KTK_BF16, 128),
    codes(KTK_BF16, KTK_U8, 32),
    codes(KTK_BF16, KTK_U8, 64),
    codes(KTK_BF16, KTK_U8, 128),
    // What only comes as it is.
    codes(KTK_F16, KTK_NONE, 32),
    codes(KTK_F16, KTK_NONE, 64),
    codes(KTK_F16, KTK_NONE, 128),
    codes(KTK_F16, KTK_U8, 32),
    codes(KTK_F16, KTK_U8, 64),
    codes(KTK_F16, KTK_U8, 128),
    codes(KTK_BF16, KTK_NONE, 256),
    codes(KTK_BF16, KTK_U8, 256),
    codes(KTK_F16, KTK_NONE, 256),
    codes(KTK_F16, KTK_U8, 256),
    codes(KTK_F16, KTK_F16, 32),
    codes(KTK_F16, KTK_F16, 64),
    codes(KTK_F16, KTK_F16, 128),
};
constexpr uint32_t kNumFormats = sizeof kFormats / sizeof *kFormats;
constexpr uint32_t kNumFromFloats = 10;

constexpr ktk_format kFloats[] = {
    floats(KTK_BF16),
    floats(KTK_F16),
    floats(KTK_F32),
    {KTK_E4M3, KTK_F32, KTK_NONE, 128, 128},
    {KTK_E4M3, KTK_F32, KTK_NONE, 1, 0},
};
constexpr uint32_t kNumFloats = sizeof kFloats / sizeof *kFloats;

struct Accepts {
  ktk_accept list[kNumFloats * kNumFromFloats + kNumFormats];
};

constexpr Accepts make_accepts() {
  Accepts result{};
  ktk_accept* to = result.list;
  for (const ktk_format& given : kFloats) {
    for (uint32_t stored = 0; stored < kNumFromFloats; ++stored) *to++ = {given, stored};
  }
  for (uint32_t stored = 0; stored < kNumFormats; ++stored) {
    *to++ = {kFormats[stored], stored};
  }
  return result;
}

constexpr Accepts kAccepts = make_accepts();

}  // namespace

KTK_BACKEND_MODULE("AMXINT4", kFormats, kAccepts.list)
