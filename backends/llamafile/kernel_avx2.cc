// Plain AVX2.
#include "llamafile/matmul.h"
#include "llamafile/variant.h"

extern "C" {
extern const ktk_variant KTK_VARIANT(llamafile);
constexpr ktk_variant KTK_VARIANT(llamafile) =
    ktk::llamafile::make_variant(ktk::llamafile::kUkernels);
}
