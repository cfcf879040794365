#include "format/elements.h"

#include <charconv>
#include <stdexcept>

namespace ktk {
namespace {

struct Element {
  ktk_element element;
  const char* name;
  Block block;
};

// Of ggml's types those that weights come in; numbers and sizes are those of its ggml.h and
// ggml-common.h.
constexpr Element kElements[] = {
    {KTK_F32, "f32", {1, 4}},
    {KTK_F16, "f16", {1, 2}},
    {KTK_BF16, "bf16", {1, 2}},
    {KTK_I8, "i8", {1, 1}},
    {KTK_U8, "u8", {1, 1}},
    {KTK_I4, "i4", {2, 1}},
    {KTK_U4, "u4", {2, 1}},
    {KTK_E4M3, "e4m3", {1, 1}},
    {KTK_E5M2, "e5m2", {1, 1}},
    {KTK_E2M1, "e2m1", {2, 1}},
    {KTK_UE8M0, "ue8m0", {1, 1}},
    {KTK_I16, "i16", {1, 2}},
    {KTK_GGML + 2, "q4_0", {32, 18}},
    {KTK_GGML + 3, "q4_1", {32, 20}},
    {KTK_GGML + 6, "q5_0", {32, 22}},
    {KTK_GGML + 7, "q5_1", {32, 24}},
    {KTK_GGML + 8, "q8_0", {32, 34}},
    {KTK_GGML + 10, "q2_k", {256, 84}},
    {KTK_GGML + 11, "q3_k", {256, 110}},
    {KTK_GGML + 12, "q4_k", {256, 144}},
    {KTK_GGML + 13, "q5_k", {256, 176}},
    {KTK_GGML + 14, "q6_k", {256, 210}},
    {KTK_GGML + 16, "iq2_xxs", {256, 66}},
    {KTK_GGML + 17, "iq2_xs", {256, 74}},
    {KTK_GGML + 18, "iq3_xxs", {256, 98}},
    {KTK_GGML + 19, "iq1_s", {256, 50}},
    {KTK_GGML + 20, "iq4_nl", {32, 18}},
    {KTK_GGML + 21, "iq3_s", {256, 110}},
    {KTK_GGML + 22, "iq2_s", {256, 82}},
    {KTK_GGML + 23, "iq4_xs", {256, 136}},
    {KTK_GGML + 29, "iq1_m", {256, 56}},
    {KTK_GGML + 34, "tq1_0", {256, 54}},
    {KTK_GGML + 35, "tq2_0", {256, 66}},
    {KTK_GGML + 39, "mxfp4", {32, 17}},
    {KTK_GGML + 40, "nvfp4", {64, 36}},
    // Of ik_llama.cpp. Where files have a scale for a row, each of its blocks is here behind a
    // copy.
    {KTK_GGML + 133, "q6_0", {32, 26}},
    {KTK_GGML + 137, "iq2_k", {256, 76}},
    {KTK_GGML + 138, "iq3_k", {256, 110}},
    {KTK_GGML + 139, "iq4_k", {256, 144}},
    {KTK_GGML + 140, "iq5_k", {256, 176}},
    {KTK_GGML + 141, "iq6_k", {256, 212}},
    {KTK_GGML + 144, "iq4_ks", {256, 140}},
    {KTK_GGML + 145, "iq2_ks", {256, 72}},
    {KTK_GGML + 146, "iq4_kss", {256, 132}},
    {KTK_GGML + 151, "q8_kv", {32, 36}},
    {KTK_GGML + 152, "iq5_ks", {256, 172}},
    {KTK_GGML + 153, "iq2_kt", {256, 72}},
    {KTK_GGML + 154, "iq3_kt", {256, 104}},
    {KTK_GGML + 155, "iq4_kt", {256, 132}},
    {KTK_GGML + 156, "iq3_ks", {256, 104}},
    {KTK_GGML + 157, "iq2_kl", {256, 88}},
    {KTK_GGML + 158, "iq1_kt", {256, 60}},
};
constexpr const char* kNone = "none";
constexpr const char* kGgml = "ggml:";

const Element* find(ktk_element element) {
  for (const Element& known : kElements) {
    if (known.element == element) return &known;
  }
  return nullptr;
}

}  // namespace

Block block_of(ktk_element element) {
  const Element* known = find(element);
  return known ? known->block : Block{0, 0};
}

size_t element_bits(ktk_element element) {
  const Element* known = find(element);
  return known && !is_ggml(element) ? 8 * known->block.bytes / known->block.columns : 0;
}

std::string element_name(ktk_element element) {
  if (element == KTK_NONE) return kNone;
  if (const Element* known = find(element)) return known->name;
  if (is_ggml(element)) return kGgml + std::to_string(element - KTK_GGML);
  return "element " + std::to_string(element);
}

ktk_element element_from_name(const std::string& name) {
  if (name == kNone) return KTK_NONE;
  for (const Element& known : kElements) {
    if (known.name == name) return known.element;
  }
  if (name.rfind(kGgml, 0) == 0) {
    uint16_t number = 0;
    const char* end = name.data() + name.size();
    const auto [at, error] = std::from_chars(name.data() + std::string(kGgml).size(), end, number);
    if (error == std::errc() && at == end) return KTK_GGML + ktk_element{number};
  }
  throw std::invalid_argument("'" + name + "' is not an element type");
}

}  // namespace ktk
