// BF16Z: what BF16 stores, bit for bit, in 12 bits for each weight.
#include "ktk/module.h"

#include "bf16/formats.h"

KTK_BACKEND_MODULE("BF16Z", kFormats, kAccepts)
