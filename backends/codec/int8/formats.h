// What backends store that keep int8 with a scale per row, and take: floats, and such rows.
#pragma once

#include "ktk/abi.h"

namespace ktk {

inline constexpr ktk_format kInt8Formats[] = {{KTK_I8, KTK_F32, KTK_NONE, 1, 0}};

inline constexpr ktk_accept kInt8Accepts[] = {
    {{KTK_BF16, KTK_NONE, KTK_NONE, 0, 0}, 0},
    {{KTK_F16, KTK_NONE, KTK_NONE, 0, 0}, 0},
    {{KTK_F32, KTK_NONE, KTK_NONE, 0, 0}, 0},
    {kInt8Formats[0], 0},
};

}  // namespace ktk
