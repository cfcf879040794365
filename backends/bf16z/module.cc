// BF16Z: what BF16 stores, bit for bit, in 12 bits for each weight.
#include "ktk/module.h"

namespace {

constexpr ktk_format kFormats[] = {
    {.element = KTK_BF16, .scale = KTK_NONE, .zero = KTK_NONE, .group_n = 0, .group_k = 0},
};

constexpr ktk_accept kAccepts[] = {
    {.given = kFormats[0], .stored = 0},
    {.given = {.element = KTK_F16, .scale = KTK_NONE, .zero = KTK_NONE, .group_n = 0, .group_k = 0},
     .stored = 0},
    {.given = {.element = KTK_F32, .scale = KTK_NONE, .zero = KTK_NONE, .group_n = 0, .group_k = 0},
     .stored = 0},
};

}  // namespace

KTK_BACKEND_MODULE("BF16Z", kFormats, kAccepts)
