// The parts of _core, one file each.
#pragma once

#include <nanobind/nanobind.h>

namespace ktk {

void bind_system(nanobind::module_& m);   // instruction sets, topology, WorkerPool
void bind_backend(nanobind::module_& m);  // Format, VariantInfo, Backend
void bind_packed(nanobind::module_& m);   // PackedMatrix
void bind_moe(nanobind::module_& m);      // MoE
void bind_linear(nanobind::module_& m);   // Linear, LinearCall
void bind_stream(nanobind::module_& m);   // AsyncCall, Carry, Latch, Job

}  // namespace ktk
