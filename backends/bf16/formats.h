// What BF16 and BF16Z store, and what they take for it.
#pragma once

#include "ktk/abi.h"

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
