// @NAME@: what it stores and what it accepts.
#include "ktk/module.h"

namespace {

constexpr ktk_format kFormats[] = {
    {.element = KTK_F32, .scale = KTK_NONE, .zero = KTK_NONE, .group_n = 0, .group_k = 0},
};

constexpr ktk_accept kAccepts[] = {
    {.given = kFormats[0], .stored = 0},
};

}  // namespace

KTK_BACKEND_MODULE("@NAME@", kFormats, kAccepts)
