// AMXINT8: int8 weights with a scale per row, quantised from floats when loaded, or ready-made.
#include "ktk/module.h"

#include "codec/int8/formats.h"

KTK_BACKEND_MODULE("AMXINT8", ktk::kInt8Formats, ktk::kInt8Accepts)
