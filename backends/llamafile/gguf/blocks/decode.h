// The decoder of a type.
#pragma once

#include "llamafile/gguf/blocks/codebooks.h"
#include "llamafile/gguf/blocks/ik.h"
#include "llamafile/gguf/blocks/k_quants.h"
#include "llamafile/gguf/blocks/legacy.h"

namespace ktk::llamafile {
namespace {

inline Decode* decoder(ktk_element element) {
  switch (element) {
    case kQ4_0:
      return decode_legacy<kQ4_0>;
    case kQ4_1:
      return decode_legacy<kQ4_1>;
    case kQ5_0:
      return decode_legacy<kQ5_0>;
    case kQ5_1:
      return decode_legacy<kQ5_1>;
    case kQ8_0:
      return decode_legacy<kQ8_0>;
    case kIQ4_NL:
      return decode_legacy<kIQ4_NL>;
    case kMXFP4:
      return decode_legacy<kMXFP4>;
    case kNVFP4:
      return decode_nvfp4;
    case kQ2_K:
      return decode_q2_k;
    case kQ3_K:
      return decode_q3_k;
    case kQ4_K:
      return decode_q4_k;
    case kQ5_K:
      return decode_q5_k;
    case kQ6_K:
      return decode_q6_k;
    case kIQ4_XS:
      return decode_iq4_xs;
    case kTQ1_0:
      return decode_tq1_0;
    case kTQ2_0:
      return decode_tq2_0;
    case kIQ1_S:
      return decode_iq1_s;
    case kIQ1_M:
      return decode_iq1_m;
    case kIQ2_XXS:
      return decode_iq2_xxs;
    case kIQ2_XS:
      return decode_iq2_xs;
    case kIQ2_S:
      return decode_iq2_s;
    case kIQ3_XXS:
      return decode_iq3_xxs;
    case kIQ3_S:
      return decode_iq3_s;
    case kIQ2_K:
      return decode_iq2_k;
    case kIQ3_K:
      return decode_iq3_k;
    case kIQ4_K:
      return decode_iq4_k;
    case kIQ5_K:
      return decode_iq5_k;
    case kIQ2_KS:
      return decode_iq2_ks;
    case kIQ3_KS:
      return decode_iq3_ks;
    case kIQ4_KS:
      return decode_iq4_ks;
    case kIQ5_KS:
      return decode_iq5_ks;
    case kIQ4_KSS:
      return decode_iq4_kss;
    case kIQ2_KL:
      return decode_iq2_kl;
    case kQ6_0:
      return decode_legacy<kQ6_0>;
    case kQ8_KV:
      return decode_legacy<kQ8_KV>;
  }
  __builtin_unreachable();
}

}  // namespace
}  // namespace ktk::llamafile
