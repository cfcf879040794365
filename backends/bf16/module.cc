// BF16: weights as most checkpoints hold them, two bytes each, no scales. Wider ones are rounded.
#include "ktk/module.h"

#include "bf16/formats.h"

KTK_BACKEND_MODULE("BF16", kFormats, kAccepts)
