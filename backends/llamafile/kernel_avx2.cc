// Plain AVX2.
#include "llamafile/matmul.h"
#include "llamafile/variant.h"

namespace ktk::llamafile {
namespace {

constexpr ktk_variant kOthers = make_table(kUkernels);
using Both = WithBf16<kOthers>;
constexpr ktk_ukernel kBothUkernels[] = {Both::ukernel<0>("tiles")};

}  // namespace
}  // namespace ktk::llamafile

extern "C" {
extern const ktk_variant KTK_VARIANT(llamafile);
constexpr ktk_variant KTK_VARIANT(llamafile) =
    ktk::llamafile::Both::make(ktk::llamafile::kBothUkernels);
}
