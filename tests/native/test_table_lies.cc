// A table that says nonsense is refused with a sentence that names the field and the value.
#include <functional>

#include "a_table.h"
#include "check.h"
#include "core/size.h"
#include "moe/weights.h"

namespace {

std::string refused(const std::function<void(ktk_variant&)>& change) {
  ktk_variant variant = kVariant;
  change(variant);
  return CHECK_THROWS(std::invalid_argument, table_of(variant));
}

std::string refused_backend(const std::function<void(ktk_backend&)>& change) {
  const ktk_variant* const variants[] = {&kVariant};
  ktk_backend backend = backend_of(variants);
  change(backend);
  return CHECK_THROWS(std::invalid_argument, ktk::BackendTable::copy(&backend));
}

std::string refused_format(const ktk_format& format) {
  return refused_backend([&](ktk_backend& b) {
    b.formats = &format;
    b.num_formats = 1;
  });
}

size_t size_of_source(const ktk_matrix*, const ktk_source*, size_t, size_t) { return 0; }
void pack_sized(const ktk_matrix*, const ktk_source*, size_t, size_t, void*, size_t) {}

TEST(a_struct_that_is_too_small_says_what_is_missing) {
  CHECK_EQ(refused([](ktk_variant& v) { v.struct_size = 40; }),
           "TEST, variants[0]: struct_size is 40, but a struct up to its field leave has 200 "
           "bytes");
  // All of 1.0 is there, also what may be NULL.
  CHECK_EQ(refused([](ktk_variant& v) { v.struct_size = offsetof(ktk_variant, leave); }),
           "TEST, variants[0]: struct_size is 192, but a struct up to its field leave has 200 "
           "bytes");
  CHECK_EQ(refused([](ktk_variant& v) { v.struct_size = SIZE_MAX; }),
           "TEST, variants[0]: struct_size is 18446744073709551615; expected at most 4096");
  CHECK_EQ(refused_backend([](ktk_backend& b) { b.struct_size = 8; }),
           "backend: struct_size is 8, but a struct up to its field num_variants has 72 bytes");
  ktk_ukernel kernel = kKernel;
  kernel.struct_size = 16;
  CHECK_EQ(
      refused([&](ktk_variant& v) { v.ukernels = &kernel; }),
      "TEST, variant any, ukernels[0]: struct_size is 16, but a struct up to its field run has "
      "40 bytes");
  kernel.struct_size = sizeof kernel + 4;
  CHECK_EQ(refused([&](ktk_variant& v) { v.ukernels = &kernel; }),
           "TEST, variant any, ukernels[0]: struct_size is 44; expected a multiple of 8");
}

TEST(pointers_that_must_not_be_null_are_named) {
  CHECK_EQ(refused([](ktk_variant& v) { v.name = nullptr; }), "TEST, variants[0]: name is NULL");
  CHECK_EQ(refused([](ktk_variant& v) { v.layout = nullptr; }),
           "TEST, variant any: layout is NULL");
  CHECK_EQ(refused([](ktk_variant& v) { v.pack_weight = nullptr; }),
           "TEST, variant any: pack_weight is NULL");
  CHECK_EQ(refused([](ktk_variant& v) { v.unpack_act = nullptr; }),
           "TEST, variant any: unpack_act is NULL");
  CHECK_EQ(refused([](ktk_variant& v) { v.ukernels = nullptr; }),
           "TEST, variant any: ukernels is NULL");
  CHECK_EQ(refused([](ktk_variant& v) { v.enter = [] {}; }),
           "TEST, variant any: has enter, but leave is NULL");
  CHECK_EQ(refused([](ktk_variant& v) { v.source_size = size_of_source; }),
           "TEST, variant any: has source_size, but pack_sized is NULL");
  CHECK_EQ(refused([](ktk_variant& v) { v.pack_sized = pack_sized; }),
           "TEST, variant any: has pack_sized, but source_size is NULL");
  CHECK_EQ(refused([](ktk_variant& v) {
             v.is_packed = [](const ktk_matrix*, const void*, size_t) { return 1; };
           }),
           "TEST, variant any: export_weight is NULL");
  CHECK_EQ(refused_backend([](ktk_backend& b) { b.name = nullptr; }), "backend: name is NULL");
  CHECK_EQ(refused_backend([](ktk_backend& b) { b.formats = nullptr; }), "TEST: formats is NULL");
  CHECK_EQ(refused_backend([](ktk_backend& b) { b.num_accepts = SIZE_MAX; }),
           "TEST: num_accepts is 18446744073709551615; expected 1 to 4096");
}

TEST(names_are_utf_8) {
  for (const char* name :
       {"na\xefve", "\xc0\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82"}) {
    CHECK_EQ(refused([&](ktk_variant& v) { v.name = name; }),
             "TEST, variants[0]: name is not UTF-8");
  }
  CHECK_EQ(refused([](ktk_variant& v) { v.layout = "\xff"; }),
           "TEST, variant any: layout is not UTF-8");
  CHECK_EQ(refused([](ktk_variant& v) { v.layout = ""; }), "TEST, variant any: layout is empty");
  CHECK_EQ(refused_backend([](ktk_backend& b) { b.name = "\x80"; }), "backend: name is not UTF-8");
  ktk_variant fine = kVariant;
  fine.name = "na\xc3\xafve \xe2\x82\xac \xf0\x9f\x98\x80";
  CHECK_EQ(std::string(table_of(fine)->select("").name), fine.name);
}

TEST(formats_are_made_of_what_there_is) {
  CHECK_EQ(
      refused_format({77, KTK_NONE, KTK_NONE, 0, 0}),
      "TEST: formats[0].element is element 77; expected an element type of abi.h that ktk knows");
  CHECK_EQ(refused_format({KTK_I8, 99, KTK_NONE, 1, 0}),
           "TEST: formats[0].scale is element 99; expected KTK_NONE or an element of whole bytes");
  CHECK_EQ(refused_format({KTK_I8, KTK_F32, KTK_U4, 1, 0}),
           "TEST: formats[0].zero is u4; expected KTK_NONE or an element of whole bytes");
  CHECK_EQ(refused_format({KTK_U4, KTK_F32, KTK_NONE, 1, 33}),
           "TEST: formats[0].group_k is 33; expected 0 (the whole extent) or a multiple of 2 up to "
           "16777216");
  CHECK_EQ(refused_format({KTK_I8, KTK_F32, KTK_NONE, 1u << 31, 0}),
           "TEST: formats[0].group_n is 2147483648; expected 0 (the whole extent) or a multiple of "
           "1 up to 16777216");
  CHECK_EQ(refused_format({KTK_GGML + 8, KTK_F32, KTK_NONE, 1, 32}),
           "TEST: formats[0] is q8_0, which has its scales in its blocks, beside a scale or a zero "
           "point");
  const ktk_accept stored_nowhere = {kF32, 9};
  CHECK_EQ(refused_backend([&](ktk_backend& b) {
             b.accepts = &stored_nowhere;
             b.num_accepts = 1;
           }),
           "TEST: accepts[0].stored is 9, but there are 3 formats");
  CHECK_EQ(refused([](ktk_variant& v) { v.tile.n_step = 0; }),
           "TEST, variant any: tile.n_step is 0; expected 1 to 4096");
}

// What the size functions of the next test say.
size_t said = 0;
size_t lie(const ktk_matrix*) { return said; }
size_t lie_of_scratch(const ktk_matrix*, size_t) { return said; }

TEST(sizes_that_cannot_be_are_refused_when_they_are_asked_for) {
  ktk_variant variant = kVariant;
  variant.weight_size = variant.act_size = lie;
  ktk_ukernel kernel = kKernel;
  kernel.scratch_size = lie_of_scratch;
  variant.ukernels = &kernel;
  const auto table = table_of(variant);
  const ktk::Variant& v = table->select("");
  const ktk_matrix matrix = {16, 32, kF32};
  for (const size_t size : {size_t{0}, size_t{65}}) {
    said = size;
    const std::string expected = " says " + std::to_string(size) +
                                 " bytes for a weight [16, 32] in f32; expected a positive "
                                 "multiple of 64";
    CHECK_EQ(CHECK_THROWS(std::runtime_error, v.weight_bytes(matrix)),
             "TEST, variant any: weight_size" + expected);
    CHECK_EQ(CHECK_THROWS(std::runtime_error, v.act_bytes(matrix)),
             "TEST, variant any: act_size" + expected);
  }
  for (const size_t size : {ktk::kMostBytes + 64, size_t{1} << 62, SIZE_MAX, SIZE_MAX - 63}) {
    said = size;
    const std::string expected = " says " + std::to_string(size) +
                                 " bytes for a weight [16, 32] in f32, which is more than the 2^47 "
                                 "bytes that a process can address";
    CHECK_EQ(CHECK_THROWS(std::length_error, v.weight_bytes(matrix)),
             "TEST, variant any: weight_size" + expected);
    CHECK_EQ(CHECK_THROWS(std::length_error, v.act_bytes(matrix)),
             "TEST, variant any: act_size" + expected);
    CHECK_EQ(CHECK_THROWS(std::length_error, v.scratch_bytes(v.kernels[0], matrix, 1)),
             "TEST, variant any: scratch_size" + expected);
  }
  said = 0;
  CHECK_EQ(v.scratch_bytes(v.kernels[0], matrix, 1), 0u);
}

TEST(a_source_takes_no_less_than_its_extents_do) {
  ktk_variant variant = kVariant;
  variant.source_size = size_of_source;
  variant.pack_sized = pack_sized;
  variant.pack_weight = nullptr;
  const auto table = table_of(variant);
  const ktk::Variant& v = table->select("");
  const ktk_matrix matrix = {16, 32, kF32};
  CHECK_EQ(v.weight_bytes(matrix, 64), 64u);
  CHECK_EQ(v.weight_bytes(matrix, 640), 640u);
  CHECK_EQ(CHECK_THROWS(std::runtime_error, v.weight_bytes(matrix, 96)),
           "TEST, variant any: source_size says 96 bytes for a weight [16, 32] in f32; expected a "
           "positive multiple of 64");
  variant.weight_size = lie;
  said = 128;
  const auto larger = table_of(variant);
  CHECK_EQ(CHECK_THROWS(std::runtime_error, larger->select("").weight_bytes(matrix, 64)),
           "TEST, variant any: source_size says 64 bytes for a weight [16, 32] in f32; expected "
           "the 128 of weight_size, or more");
}

TEST(sizes_of_a_layer_do_not_wrap) {
  ktk_variant variant = kVariant;
  variant.weight_size = lie;
  const auto table = table_of(variant);
  ktk::ExpertSource source{};
  source.gate.format = source.up.format = source.down.format = kF32;
  const size_t large = size_t{1} << 24;
  const ktk::Config config{.num_experts = large, .top_k = 1, .hidden = 32, .intermediate = 32};
  const auto make = [&] {
    return ktk::Weights(config, table->select(""), {kF32, kF32, kF32}, source, {-1});
  };
  said = size_t{1} << 40;  // 2^24 experts of 3 x 2^40 bytes wrap around 2^64
  CHECK_EQ(CHECK_THROWS(std::length_error, make()),
           "16777216 x 3298534883328 is more than the 2^47 bytes that a process can address");
}

TEST(a_table_is_asked_about_matrices_that_exist_only) {
  const auto table = table_of(kVariant);
  CHECK_EQ(table->matrix(kQ4, 16, 256).k, 256u);
  CHECK_THROWS(std::invalid_argument, table->matrix(kQ4, 16, 0));
  CHECK_THROWS(std::invalid_argument, table->matrix(kQ4, (size_t{1} << 24) + 1, 256));
  CHECK_EQ(CHECK_THROWS(std::invalid_argument, table->matrix(kActI8, 16, 64)),
           "TEST does not store weights as i8 with f32 scales per 1 x 32");
}

}  // namespace
