// AVX-512 with vpdpbusd: Ice Lake and later servers, Zen 4, Zen 5.
#include "llamafile/gemm_in_regs.h"
#include "llamafile/variant.h"

namespace ktk::llamafile {
namespace {

constexpr ktk_variant kOthers = make_table(kManyRowsUkernels);

}  // namespace
}  // namespace ktk::llamafile

extern "C" {
extern const ktk_variant KTK_VARIANT(llamafile);
constexpr ktk_variant KTK_VARIANT(llamafile) =
    ktk::llamafile::WithBf16<ktk::llamafile::kOthers>::make();
}
