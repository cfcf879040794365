// LLAMAFILE: ggml's block types and floats, exactly as GGUF files hold them.
#include "ktk/module.h"

#include "llamafile/floats/blocks.h"
#include "llamafile/gguf/types.h"

namespace {

using namespace ktk::llamafile;

// Blocks are self-contained: what is given is what is stored.
constexpr ktk_format format(ktk_element element) {
  const uint32_t block =
      floats::find_float_block(element) ? kSuperBlock : block_type(element).block;
  return {element, KTK_NONE, KTK_NONE, 1, block};
}

constexpr ktk_format float_format(ktk_element element) {
  return {element, KTK_NONE, KTK_NONE, 0, 0};
}

constexpr ktk_format kFormats[] = {
    format(kQ4_K),         format(kQ5_K),          format(kQ6_K),    format(kQ8_0),
    format(kQ4_0),         format(kQ4_1),          format(kQ5_0),    format(kQ5_1),
    format(kIQ4_NL),       format(kIQ4_XS),        format(kMXFP4),   format(kNVFP4),
    format(kQ2_K),         format(kQ3_K),          format(kTQ1_0),   format(kTQ2_0),
    format(kIQ1_S),        format(kIQ1_M),         format(kIQ2_XXS), format(kIQ2_XS),
    format(kIQ2_S),        format(kIQ3_XXS),       format(kIQ3_S),   float_format(KTK_F32),
    float_format(KTK_F16), float_format(KTK_BF16), format(kIQ2_K),   format(kIQ3_K),
    format(kIQ4_K),        format(kIQ5_K),         format(kIQ2_KS),  format(kIQ3_KS),
    format(kIQ4_KS),       format(kIQ5_KS),        format(kIQ4_KSS), format(kIQ2_KL),
    format(kQ6_0),         format(kQ8_KV),         format(kIQ6_K),   format(kIQ1_KT),
    format(kIQ2_KT),       format(kIQ3_KT),        format(kIQ4_KT),
};
constexpr uint32_t kNumFormats = sizeof kFormats / sizeof *kFormats;

struct Accepts {
  ktk_accept rows[kNumFormats];
  constexpr Accepts() : rows{} {
    for (uint32_t i = 0; i < kNumFormats; ++i) rows[i] = {kFormats[i], i};
  }
};
constexpr Accepts kAccepts;

}  // namespace

KTK_BACKEND_MODULE("LLAMAFILE", kFormats, kAccepts.rows)
