// AVX-512 with vpdpbusd: Ice Lake and later servers, Zen 4, Zen 5.
#include "llamafile/held.h"
#include "llamafile/variant.h"

extern "C" {
extern const ktk_variant KTK_VARIANT(llamafile);
constexpr ktk_variant KTK_VARIANT(llamafile) =
    ktk::llamafile::make_variant(ktk::llamafile::kManyRowsUkernels);
}
