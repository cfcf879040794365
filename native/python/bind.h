// The parts of _core, one file each.
#pragma once

#include <nanobind/nanobind.h>

namespace ktk {

void bind_system(nanobind::module_& m);   // instruction sets, topology, WorkerPool
void bind_backend(nanobind::module_& m);  // Format, VariantInfo, Backend
void bind_packed(nanobind::module_& m);   // PackedMatrix
void bind_moe(nanobind::module_& m);      // MoE
void bind_linear(nanobind::module_& m);   // Linear, LinearGroup, LinearCall
void bind_between(nanobind::module_& m);  // rms_norm, rotate, route
void bind_step(nanobind::module_& m);  // AttentionStep, layer_step, route_and_compute, add_rms_norm
void bind_train(nanobind::module_& m);   // FloatBackend, backward passes
void bind_stream(nanobind::module_& m);  // AsyncCall, Carry, Latch, Job
void bind_divide(nanobind::module_& m);  // expert_ids, divide_tokens

}  // namespace ktk
