// AVX-512 with vpdpbusd: Ice Lake and later servers, Zen 4, Zen 5.
#include "llamafile/held.h"
#include "llamafile/variant.h"

namespace ktk::llamafile {
namespace {

constexpr ktk_variant kOthers = make_table(kManyRowsUkernels);
using Both = WithBf16<kOthers>;
constexpr ktk_ukernel kBothUkernels[] = {Both::ukernel<0>("tiles", kFewRows),
                                         Both::ukernel<1>("tiles_held")};

}  // namespace
}  // namespace ktk::llamafile

extern "C" {
extern const ktk_variant KTK_VARIANT(llamafile);
constexpr ktk_variant KTK_VARIANT(llamafile) =
    ktk::llamafile::Both::make(ktk::llamafile::kBothUkernels);
}
