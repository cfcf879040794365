// A whole variant: BF16 weights are those of the BF16 backend, packed and multiplied by its code,
// which the build compiles for the same instruction set. All other types are those of a table.
#pragma once

#include "ktk/backend.h"
#include "ktk/target.h"
#include "llamafile/act.h"
#include "llamafile/either.h"

extern "C" {
extern const ktk_variant KTK_VARIANT(bf16);
}

namespace ktk::llamafile {
namespace {

template <const ktk_variant& kOthers>
class WithBf16 {
  static bool is_bf16(const ktk_matrix* matrix) { return matrix->format.element == KTK_BF16; }

  // A function of a table, which takes something with a matrix first.
  template <auto kMember>
  struct Served;
  template <class Result, class First, class... Rest,
            Result (*ktk_variant::*kMember)(First, Rest...)>
  struct Served<kMember> {
    static Result call(First first, Rest... rest) {
      const ktk_variant& table = is_bf16(matrix_of(first)) ? KTK_VARIANT(bf16) : kOthers;
      return (table.*kMember)(first, rest...);
    }
  };
  template <auto kMember>
  static constexpr auto served = Served<kMember>::call;

  static void act_format(const ktk_matrix* matrix, ktk_format* out) {
    if (!is_bf16(matrix)) return kOthers.act_format(matrix, out);
    *out = KTK_VARIANT(bf16).act;
  }

  template <size_t kIndex>
  static const ktk_ukernel& ukernel_for(const ktk_matrix* matrix, size_t m) {
    if (!is_bf16(matrix)) return kOthers.ukernels[kIndex];
    const ktk_ukernel* of_bf16 = KTK_VARIANT(bf16).ukernels;
    while (m > of_bf16->m_max) ++of_bf16;
    return *of_bf16;
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

  template <size_t... kIndices>
  struct Ukernels {
    static constexpr ktk_ukernel kAll[] = {ktk::ukernel(kOthers.ukernels[kIndices].name,
                                                        kOthers.ukernels[kIndices].m_max,
                                                        run<kIndices>, scratch_size<kIndices>)...};
  };

 public:
  // The micro-kernel of that index in the table.
  template <size_t kIndex>
  static constexpr ktk_ukernel ukernel(const char* name, size_t m_max) {
    return ktk::ukernel(name, m_max, run<kIndex>, scratch_size<kIndex>);
  }

  // With all micro-kernels of the table, which this translation unit knows.
  template <size_t... kIndices>
  static constexpr ktk_variant make(uint32_t m_step = 1, void (*enter)() = nullptr,
                                    void (*leave)() = nullptr) {
    constexpr size_t kCount = sizeof...(kIndices);
    if constexpr (kCount < kOthers.num_ukernels) {
      return make<kIndices..., kCount>(m_step, enter, leave);
    } else {
      return make_of(Ukernels<kIndices...>::kAll, m_step, enter, leave);
    }
  }

  // With these: the table is elsewhere.
  template <size_t kNumKernels>
  static constexpr ktk_variant make_of(const ktk_ukernel (&ukernels)[kNumKernels],
                                       uint32_t m_step = 1, void (*enter)() = nullptr,
                                       void (*leave)() = nullptr) {
    ktk_variant v = {};
    v.struct_size = sizeof v;
    v.name = KTK_STRING(KTK_TARGET);
    v.required_isa = KTK_TARGET_ISA;
    v.tile = {.m_step = m_step, .n_step = kNr, .k_step = kActStep};
    v.layout = kLayout;
    v.weight_size = served<&ktk_variant::weight_size>;
    v.pack_weight = served<&ktk_variant::pack_weight>;
    v.unpack_weight = served<&ktk_variant::unpack_weight>;
    v.weight_offset = served<&ktk_variant::weight_offset>;
    v.act = act_format_of(block_type(kQ4_K));  // the first format
    v.act_format = act_format;
    v.act_size = served<&ktk_variant::act_size>;
    v.pack_act = served<&ktk_variant::pack_act>;
    v.unpack_act = served<&ktk_variant::unpack_act>;
    v.ukernels = ukernels;
    v.num_ukernels = kNumKernels;
    v.enter = enter;
    v.leave = leave;
    return v;
  }
};

}  // namespace
}  // namespace ktk::llamafile
