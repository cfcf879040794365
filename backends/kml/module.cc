// KML: int8 weights with a scale per row on aarch64, quantised from floats when loaded, or ready.
#include "ktk/module.h"

namespace {

constexpr ktk_format kFormats[] = {{KTK_I8, KTK_F32, KTK_NONE, 1, 0}};

constexpr ktk_accept kAccepts[] = {
    {{KTK_BF16, KTK_NONE, KTK_NONE, 0, 0}, 0},
    {{KTK_F16, KTK_NONE, KTK_NONE, 0, 0}, 0},
    {{KTK_F32, KTK_NONE, KTK_NONE, 0, 0}, 0},
    {{KTK_I8, KTK_F32, KTK_NONE, 1, 0}, 0},
};

}  // namespace

KTK_BACKEND_MODULE("KML", kFormats, kAccepts)
