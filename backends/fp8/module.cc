// FP8: E4M3 elements with an f32 per block of 128 x 128, an f32 per row, or a power of two per 32
// (MXFP8), as the checkpoints have them.
#include "ktk/module.h"

namespace {

constexpr ktk_format kFormats[] = {
    {.element = KTK_E4M3, .scale = KTK_F32, .zero = KTK_NONE, .group_n = 128, .group_k = 128},
    {.element = KTK_E4M3, .scale = KTK_F32, .zero = KTK_NONE, .group_n = 1, .group_k = 0},
    {.element = KTK_E4M3, .scale = KTK_UE8M0, .zero = KTK_NONE, .group_n = 1, .group_k = 32},
};

// bf16 scales are widened.
constexpr ktk_accept kAccepts[] = {
    {.given = kFormats[0], .stored = 0},
    {.given = kFormats[1], .stored = 1},
    {.given = kFormats[2], .stored = 2},
    {.given = {KTK_E4M3, KTK_BF16, KTK_NONE, 128, 128}, .stored = 0},
    {.given = {KTK_E4M3, KTK_BF16, KTK_NONE, 1, 0}, .stored = 1},
};

}  // namespace

KTK_BACKEND_MODULE("FP8", kFormats, kAccepts)
