// ktk/backend.h - makes the table of a variant from a struct, and exports it.
//
// Optional: a table can be written by hand, in C, too. The struct says
//
//   struct Variant {
//     using Weight = ...;                          // weight codec
//     using Act = ...;                             // activation codec
//     static constexpr ktk_ukernel kUkernels[] = {ktk::ukernel("gemm_12x32_avx512", run)};
//     // Where they are not 1, the instruction set of the build, nothing:
//     static constexpr uint32_t kMStep = 16;       // rows of act and dst are padded to
//     static constexpr char kName[] = "sgemm";
//     static constexpr ktk_isa kMoreIsa = KTK_ISA_AVX512_VBMI;
//     static void enter(); static void leave();
//   };
//   KTK_EXPORT_VARIANT(bf16, Variant)
//
//   Weight    kLayout, kNStep; size(), pack(), unpack(); perhaps offset(), write(); where bytes
//             depend on what is packed, source_size() and pack_sized() in place of pack(); where
//             files are to keep packed bytes, is_packed()
//   Act       kFormat, kKStep; size(), pack(), unpack(); perhaps format()
//
// which are static, and take what the functions of ktk_variant (abi.h) take that they become. No
// C++ library is needed.
#pragma once

#include "ktk/target.h"

namespace ktk {
namespace {

template <class T>
concept WeightCodec = requires {
  static_cast<const char*>(T::kLayout);
  static_cast<uint32_t>(T::kNStep);
  static_cast<decltype(ktk_variant::weight_size)>(T::size);
  static_cast<decltype(ktk_variant::unpack_weight)>(T::unpack);
} && (requires { static_cast<decltype(ktk_variant::pack_weight)>(T::pack); } || requires {
  static_cast<decltype(ktk_variant::source_size)>(T::source_size);
  static_cast<decltype(ktk_variant::pack_sized)>(T::pack_sized);
});

template <class T>
concept ActCodec = requires {
  static_cast<ktk_format>(T::kFormat);
  static_cast<uint32_t>(T::kKStep);
  static_cast<decltype(ktk_variant::act_size)>(T::size);
  static_cast<decltype(ktk_variant::pack_act)>(T::pack);
  static_cast<decltype(ktk_variant::unpack_act)>(T::unpack);
};

using RunProduct = void(const ktk_matmul*);
using ScratchSize = size_t(const ktk_matrix*, size_t);

// A micro-kernel for up to m_max rows.
constexpr ktk_ukernel ukernel(const char* name, size_t m_max, RunProduct* run,
                              ScratchSize* scratch_size = nullptr) {
  return {
      .struct_size = sizeof(ktk_ukernel),
      .name = name,
      .m_max = m_max,
      .scratch_size = scratch_size,
      .run = run,
  };
}

// A micro-kernel for any number of rows.
constexpr ktk_ukernel ukernel(const char* name, RunProduct* run,
                              ScratchSize* scratch_size = nullptr) {
  return ukernel(name, SIZE_MAX, run, scratch_size);
}

template <class V>
constexpr ktk_variant make_variant() {
  using Weight = typename V::Weight;
  using Act = typename V::Act;
  static_assert(WeightCodec<Weight>, "Weight lacks something, or has it with another type");
  static_assert(ActCodec<Act>, "Act lacks something, or has it with another type");
  ktk_variant v = {};
  v.struct_size = sizeof v;
  if constexpr (requires { V::kName; }) {
    v.name = V::kName;
  } else {
    v.name = KTK_STRING(KTK_TARGET);
  }
  v.required_isa = KTK_TARGET_ISA;
  if constexpr (requires { V::kMoreIsa; }) v.required_isa |= V::kMoreIsa;
  v.tile = {.m_step = 1, .n_step = Weight::kNStep, .k_step = Act::kKStep};
  if constexpr (requires { V::kMStep; }) v.tile.m_step = V::kMStep;
  v.layout = Weight::kLayout;
  v.weight_size = Weight::size;
  if constexpr (requires { Weight::pack; }) v.pack_weight = Weight::pack;
  if constexpr (requires { Weight::pack_sized; }) {
    v.source_size = Weight::source_size;
    v.pack_sized = Weight::pack_sized;
  }
  v.unpack_weight = Weight::unpack;
  if constexpr (requires { Weight::offset; }) v.weight_offset = Weight::offset;
  if constexpr (requires { Weight::write; }) v.export_weight = Weight::write;
  if constexpr (requires { Weight::is_packed; }) v.is_packed = Weight::is_packed;
  v.act = Act::kFormat;
  if constexpr (requires { Act::format; }) v.act_format = Act::format;
  v.act_size = Act::size;
  v.pack_act = Act::pack;
  v.unpack_act = Act::unpack;
  v.ukernels = V::kUkernels;
  v.num_ukernels = sizeof V::kUkernels / sizeof *V::kUkernels;
  if constexpr (requires { V::enter; }) {
    v.enter = V::enter;
    v.leave = V::leave;
  }
  return v;
}

}  // namespace
}  // namespace ktk

// Defines ktk_<backend>_<isa>, the one symbol that a kernel file exports.
#define KTK_EXPORT_VARIANT(backend, ...)                                         \
  extern "C" {                                                                   \
  extern const ktk_variant KTK_VARIANT(backend);                                 \
  constexpr ktk_variant KTK_VARIANT(backend) = ktk::make_variant<__VA_ARGS__>(); \
  }
