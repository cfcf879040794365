// A whole variant: BF16 weights are those of the BF16 backend, packed and multiplied by its code,
// which the build compiles for the same instruction set. All other types are those of a table.
#pragma once

#include "common/ukernel.h"
#include "ktk/target.h"
#include "llamafile/act.h"

extern "C" {
extern const ktk_variant KTK_VARIANT(bf16);
}

namespace ktk::llamafile {
namespace {

inline const ktk_matrix* matrix_of(const ktk_matrix* matrix) { return matrix; }
inline const ktk_matrix* matrix_of(const ktk_matmul* mm) { return mm->matrix; }

template <const ktk_variant& kOthers>
class WithBf16 {
  static bool is_bf16(const ktk_matrix* matrix) { return matrix->format.element == KTK_BF16; }

  // A function of a table, which takes something with a matrix first.
  template <auto kMember>
  struct Either;
  template <class Result, class First, class... Rest,
            Result (*ktk_variant::*kMember)(First, Rest...)>
  struct Either<kMember> {
    static Result call(First first, Rest... rest) {
      const ktk_variant& table = is_bf16(matrix_of(first)) ? KTK_VARIANT(bf16) : kOthers;
      return (table.*kMember)(first, rest...);
    }
  };
  template <auto kMember>
  static constexpr auto either = Either<kMember>::call;

  static void act_format(const ktk_matrix* matrix, ktk_format* out) {
    if (!is_bf16(matrix)) return kOthers.act_format(matrix, out);
    *out = KTK_VARIANT(bf16).act;
  }

  // BF16 has one micro-kernel for any number of rows, without scratch.
  template <size_t kIndex>
  static void run(const ktk_matmul* mm) {
    const bool is_other = !is_bf16(mm->matrix);
    (is_other ? kOthers.ukernels[kIndex] : *KTK_VARIANT(bf16).ukernels).run(mm);
  }
  template <size_t kIndex>
  static size_t scratch_size(const ktk_matrix* matrix, size_t m) {
    const auto size = kOthers.ukernels[kIndex].scratch_size;
    return is_bf16(matrix) || !size ? 0 : size(matrix, m);
  }

 public:
  // The micro-kernel of that index in the table.
  template <size_t kIndex>
  static constexpr ktk_ukernel ukernel(const char* name, size_t m_max = SIZE_MAX) {
    return make_ukernel(name, m_max, run<kIndex>, scratch_size<kIndex>);
  }

  template <size_t kNumKernels>
  static constexpr ktk_variant make(const ktk_ukernel (&ukernels)[kNumKernels], uint32_t m_step = 1,
                                    void (*enter)() = nullptr, void (*leave)() = nullptr) {
    return {
        .struct_size = sizeof(ktk_variant),
        .name = KTK_STRING(KTK_TARGET),
        .required_isa = KTK_TARGET_ISA,
        .tile = {.m_step = m_step, .n_step = kColumns, .k_step = kUnit},
        .act = kActFormat,
        .layout = kLayout,
        .weight_size = either<&ktk_variant::weight_size>,
        .pack_weight = either<&ktk_variant::pack_weight>,
        .unpack_weight = either<&ktk_variant::unpack_weight>,
        .act_size = either<&ktk_variant::act_size>,
        .pack_act = either<&ktk_variant::pack_act>,
        .unpack_act = either<&ktk_variant::unpack_act>,
        .ukernels = ukernels,
        .num_ukernels = kNumKernels,
        .enter = enter,
        .leave = leave,
        .weight_offset = either<&ktk_variant::weight_offset>,
        .act_format = act_format,
    };
  }
};

}  // namespace
}  // namespace ktk::llamafile
