// Compiled with the flags of each instruction set, for what the compiler says of them.
#include "ktk/target.h"

namespace {

#define KTK_BIT_(bit, name, ...) constexpr ktk_isa name = KTK_ISA_##bit;
KTK_ISA_HERE(KTK_BIT_)

static_assert(KTK_TARGET_ISA & KTK_TARGET, "flags of native/isa/meson.build, macro of isa.h");

}  // namespace
