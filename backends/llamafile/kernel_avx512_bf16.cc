// AVX-512 with vdpbf16ps: Zen 4, Zen 5. Everything but BF16 is avx512_vnni, the same code.
#include "llamafile/dot.h"
#include "llamafile/with_bf16.h"

extern "C" {
extern const ktk_variant ktk_llamafile_avx512_vnni;
}

namespace ktk::llamafile {
namespace {

using Both = WithBf16<ktk_llamafile_avx512_vnni>;
constexpr ktk_ukernel kUkernels[] = {Both::ukernel<0>("tiles", kFewRows),
                                     Both::ukernel<1>("tiles_held", SIZE_MAX)};

}  // namespace
}  // namespace ktk::llamafile

extern "C" {
extern const ktk_variant KTK_VARIANT(llamafile);
constexpr ktk_variant KTK_VARIANT(llamafile) =
    ktk::llamafile::Both::make_of(ktk::llamafile::kUkernels);
}
