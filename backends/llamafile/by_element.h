// One variant made of four tables: that of block types, that of block types which are computed as
// floats, that of F16 and F32, and that of the BF16 backend, whose code the build compiles for the
// same instruction set. The element of a matrix says which one a call is for.
#pragma once

#include "codec/act_rows.h"
#include "ktk/backend.h"
#include "llamafile/act.h"
#include "llamafile/floats/blocks.h"
#include "llamafile/floats/codec.h"
#include "llamafile/gguf/weight_codec.h"

extern "C" {
extern const ktk_variant KTK_VARIANT(bf16);
}

namespace ktk::llamafile {
namespace {

// The codecs of block types.
struct BlockWeight {
  static constexpr const char* kLayout = llamafile::kLayout;
  static constexpr uint32_t kNStep = kNr;
  static constexpr auto size = weight_size;
  static constexpr auto pack = pack_weight;
  static constexpr auto unpack = unpack_weight;
  static constexpr auto offset = weight_offset;
};
struct BlockAct {
  static constexpr ktk_format kFormat = act_format_of(block_type(kQ4_K));  // the first format
  static constexpr uint32_t kKStep = kActStep;
  static constexpr auto size = act_size;
  static constexpr auto pack = pack_act;
  static constexpr auto unpack = unpack_act;
  static void format(const ktk_matrix* matrix, ktk_format* out) {
    *out = act_format_of(block_type(matrix->format.element));
  }
};

// Those of F16 and F32.
struct FloatWeight {
  static constexpr const char* kLayout = llamafile::kLayout;
  static constexpr uint32_t kNStep = kNr;
  static constexpr auto size = floats::weight_size;
  static constexpr auto pack = floats::pack_weight;
  static constexpr auto unpack = floats::unpack_weight;
  static constexpr auto offset = floats::weight_offset;
};

template <RunProduct* kRun>
struct FloatVariant {
  using Weight = FloatWeight;
  using Act = ActRowsF32<kSubBlock>;
  static constexpr ktk_ukernel kUkernels[] = {ukernel("gemm_f32", kRun)};
};

template <const ktk_variant& kBlocks, const ktk_variant& kFloatBlocks, const ktk_variant& kFloats>
struct ByElement {
  static const ktk_variant& table_of(const ktk_matrix* matrix) {
    const ktk_element element = matrix->format.element;
    if (element == KTK_BF16) return KTK_VARIANT(bf16);
    if (element == KTK_F32 || element == KTK_F16) return kFloats;
    return floats::find_float_block(element) ? kFloatBlocks : kBlocks;
  }

  // A function of a table, which takes a matrix first.
  template <auto kMember>
  struct Of;
  template <class Result, class... Rest,
            Result (*ktk_variant::*kMember)(const ktk_matrix*, Rest...)>
  struct Of<kMember> {
    static Result call(const ktk_matrix* matrix, Rest... rest) {
      return (table_of(matrix).*kMember)(matrix, rest...);
    }
  };

  struct Weight {
    static constexpr const char* kLayout = llamafile::kLayout;
    static constexpr uint32_t kNStep = kNr;
    static constexpr auto size = Of<&ktk_variant::weight_size>::call;
    static constexpr auto pack = Of<&ktk_variant::pack_weight>::call;
    static constexpr auto unpack = Of<&ktk_variant::unpack_weight>::call;
    static constexpr auto offset = Of<&ktk_variant::weight_offset>::call;
  };
  struct Act {
    static constexpr ktk_format kFormat = BlockAct::kFormat;
    static constexpr uint32_t kKStep = kActStep;
    static constexpr auto size = Of<&ktk_variant::act_size>::call;
    static constexpr auto pack = Of<&ktk_variant::pack_act>::call;
    static constexpr auto unpack = Of<&ktk_variant::unpack_act>::call;
    static void format(const ktk_matrix* matrix, ktk_format* out) {
      const ktk_variant& table = table_of(matrix);
      *out = table.act;
      if (table.act_format) table.act_format(matrix, out);
    }
  };

  // The micro-kernel with this number in the table of block types. Of other tables it is that for
  // as many rows.
  template <size_t kIndex>
  static constexpr ktk_ukernel ukernel(const char* name, size_t m_max = SIZE_MAX) {
    return ktk::ukernel(name, m_max, run<kIndex>, scratch_size<kIndex>);
  }

 private:
  template <size_t kIndex>
  static const ktk_ukernel& ukernel_for(const ktk_matrix* matrix, size_t m) {
    const ktk_variant& table = table_of(matrix);
    if (&table == &kBlocks) return table.ukernels[kIndex];
    const ktk_ukernel* ukernel = table.ukernels;
    while (m > ukernel->m_max) ++ukernel;
    return *ukernel;
  }
  template <size_t kIndex>
  static void run(const ktk_matmul* mm) {
    ukernel_for<kIndex>(mm->matrix, mm->m).run(mm);
  }
  template <size_t kIndex>
  static size_t scratch_size(const ktk_matrix* matrix, size_t m) {
    const auto size = ukernel_for<kIndex>(matrix, m).scratch_size;
    return size ? size(matrix, m) : 0;
  }
};

}  // namespace
}  // namespace ktk::llamafile
