// What the core knows of elements and formats.
#include <stdexcept>
#include <string>

#include "check.h"
#include "format/elements.h"
#include "format/format.h"

namespace {

constexpr ktk_format kGroups = {KTK_I8, KTK_F32, KTK_NONE, 1, 128};

ktk_format with(uint32_t group_n, uint32_t group_k) {
  return {KTK_E4M3, KTK_F32, KTK_NONE, group_n, group_k};
}

TEST(names_of_elements_lead_back_to_them) {
  size_t known = 0;
  for (ktk_element element = 0; element < KTK_GGML + 200; ++element) {
    if (ktk::block_of(element).bytes == 0) continue;
    CHECK_EQ(ktk::element_from_name(ktk::element_name(element)), element);
    ++known;
  }
  CHECK(known > 30);
  CHECK_EQ(ktk::element_from_name("none"), ktk_element{KTK_NONE});
  CHECK_EQ(ktk::element_from_name("ggml:12"), ktk::element_from_name("q4_k"));
  CHECK_EQ(ktk::element_name(KTK_GGML + 99), "ggml:99");
  for (const char* name : {"", "q4_K", "ggml:", "ggml:12x", "ggml:65536", "ggml:-1"}) {
    CHECK_THROWS(std::invalid_argument, ktk::element_from_name(name));
  }
}

TEST(a_group_as_long_as_the_extent_is_the_whole_of_it) {
  for (const uint32_t whole : {0, 64, 65, 128}) {
    CHECK(ktk::same_format(with(whole, 32), with(0, 32), 64, 256));
    CHECK(ktk::same_format(with(32, whole), with(32, 0), 256, 64));
  }
  CHECK(!ktk::same_format(with(63, 32), with(0, 32), 64, 256));
  CHECK(!ktk::same_format(with(32, 64), with(32, 32), 256, 64));
}

TEST(groups_mean_nothing_without_scales) {
  CHECK(ktk::same_format({KTK_BF16, KTK_NONE, KTK_NONE, 1, 32},
                         {KTK_BF16, KTK_NONE, KTK_NONE, 4, 64}, 64, 256));
  CHECK(!ktk::same_format({KTK_I8, KTK_NONE, KTK_U8, 1, 32}, {KTK_I8, KTK_NONE, KTK_U8, 1, 64}, 64,
                          256));
  CHECK(!ktk::same_format({KTK_BF16, KTK_NONE, KTK_NONE, 0, 0}, {KTK_F16, KTK_NONE, KTK_NONE, 0, 0},
                          64, 256));
}

TEST(a_checkpoint_has_a_scale_for_each_group) {
  const ktk::SourceShape shape = ktk::source_shape({KTK_U4, KTK_BF16, KTK_U8, 2, 32}, 5, 65);
  CHECK_EQ(shape.groups_n, 3u);
  CHECK_EQ(shape.groups_k, 3u);
  CHECK_EQ(shape.data_bytes, 33u);
  CHECK_EQ(shape.scale_bytes, 6u);
  CHECK_EQ(shape.zero_bytes, 3u);
  const ktk_format blocks = {ktk::element_from_name("q4_k"), KTK_NONE, KTK_NONE, 1, 256};
  CHECK_EQ(ktk::source_shape(blocks, 5, 512).data_bytes, 288u);
  CHECK_EQ(ktk::source_shape(blocks, 5, 512).scale_bytes, 0u);
}

TEST(formats_have_words) {
  CHECK_EQ(ktk::describe(kGroups), "i8 with f32 scales per 1 x 128");
  CHECK_EQ(ktk::describe({KTK_U4, KTK_BF16, KTK_U8, 0, 0}),
           "u4 with bf16 scales and u8 zero points per n x k");
  CHECK_EQ(ktk::describe({KTK_BF16, KTK_NONE, KTK_NONE, 7, 7}), "bf16");
}

}  // namespace
