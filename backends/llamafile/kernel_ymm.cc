// 256 bits: plain AVX2, and AVX-VNNI, which client CPUs without AVX-512 have.
#include "llamafile/gemm.h"
#include "llamafile/variant.h"

namespace ktk::llamafile {
namespace {

constexpr ktk_variant kOthers = make_table(kUkernels);

}  // namespace
}  // namespace ktk::llamafile

extern "C" {
extern const ktk_variant KTK_VARIANT(llamafile);
constexpr ktk_variant KTK_VARIANT(llamafile) =
    ktk::llamafile::WithBf16<ktk::llamafile::kOthers>::make();
}
