// The arithmetic loops of the probe: what one file per instruction set offers.
#pragma once

#include <stddef.h>

#include "ktk/abi.h"
#include "ktk/target.h"

extern "C" {

// One kind of instruction that does the multiplying in a micro-kernel.
typedef struct ktk_probe_unit {
  const char* name;
  int act_bits = 0;  // the most bits of integers that activations may be; 0: it multiplies floats
  int weight_bits = 0;  // of integers: the most bits of weights whose sums of products are exact
  ktk_isa required_isa;
  double ops;  // operations of one iteration; a multiply and an add are two
  // Runs `iterations` of a loop that never leaves the registers. AMX units configure and release
  // the tiles themselves.
  void (*run)(size_t iterations);
} ktk_probe_unit;

typedef struct ktk_probe_target {
  size_t size;
  const ktk_probe_unit* units;
} ktk_probe_target;

}  // extern "C"

// ktk_probe_avx2 and so on, the one symbol that the file exports.
#define KTK_PROBE_TARGET KTK_CONCAT(ktk_probe_, KTK_TARGET)
