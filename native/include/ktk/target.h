// ktk/target.h - names for code that is compiled once per instruction set.
//
// The build passes -DKTK_TARGET=<isa>, the name of the instruction set in isa.h, and its flags.
#pragma once

#include "ktk/isa.h"

#define KTK_CONCAT_(a, b) a##b
#define KTK_CONCAT(a, b) KTK_CONCAT_(a, b)
#define KTK_STRING_(a) #a
#define KTK_STRING(a) KTK_STRING_(a)

// ktk_<backend>_<isa>, for example ktk_bf16_avx2: the one symbol a kernel file exports.
#define KTK_VARIANT(backend) KTK_CONCAT(KTK_CONCAT(ktk_, backend), KTK_CONCAT(_, KTK_TARGET))
