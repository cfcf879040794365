// E2M1 elements with a power of two per 32 (MXFP4) or an E4M3 per 16 (NVFP4), as the checkpoints
// have them.
#include "ktk/module.h"

namespace {

constexpr ktk_format kFormats[] = {
    {.element = KTK_E2M1, .scale = KTK_UE8M0, .zero = KTK_NONE, .group_n = 1, .group_k = 32},
    {.element = KTK_E2M1, .scale = KTK_E4M3, .zero = KTK_NONE, .group_n = 1, .group_k = 16},
};
constexpr ktk_accept kAccepts[] = {
    {.given = kFormats[0], .stored = 0},
    {.given = kFormats[1], .stored = 1},
};

}  // namespace

KTK_BACKEND_MODULE("MXFP4", kFormats, kAccepts)
