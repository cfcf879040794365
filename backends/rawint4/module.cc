// RAWINT4: 4-bit codes with a scale per group, as compressed-tensors checkpoints hold them.
#include "ktk/module.h"

namespace {

constexpr ktk_format format(ktk_element scale, uint32_t group_k) {
  return {KTK_U4, scale, KTK_NONE, 1, group_k};
}

constexpr ktk_format kFormats[] = {
    format(KTK_BF16, 32), format(KTK_BF16, 64), format(KTK_BF16, 128), format(KTK_BF16, 256),
    format(KTK_F16, 32),  format(KTK_F16, 64),  format(KTK_F16, 128),  format(KTK_F16, 256),
};

constexpr ktk_accept kAccepts[] = {
    {kFormats[0], 0}, {kFormats[1], 1}, {kFormats[2], 2}, {kFormats[3], 3},
    {kFormats[4], 4}, {kFormats[5], 5}, {kFormats[6], 6}, {kFormats[7], 7},
};

}  // namespace

KTK_BACKEND_MODULE("RAWINT4", kFormats, kAccepts)
