// MXFP4: E2M1 elements with a power of two per 32, as the checkpoints have them.
#include "ktk/module.h"

namespace {

constexpr ktk_format kFormats[] = {
    {.element = KTK_E2M1, .scale = KTK_UE8M0, .zero = KTK_NONE, .group_n = 1, .group_k = 32},
};
constexpr ktk_accept kAccepts[] = {{.given = kFormats[0], .stored = 0}};

}  // namespace

KTK_BACKEND_MODULE("MXFP4", kFormats, kAccepts)
