#include "python/step_arguments.h"

#include <utility>

#include "core/floats.h"

namespace ktk {
namespace {

// A norm of heads has as many values as one of them, or as all.
std::optional<Norm> head_norm(const char* name, nb::handle weight, const OptNormKind& kind,
                              size_t one, size_t all) {
  if (weight.is_none() != !kind) {
    throw nb::value_error(
        (std::string(name) + " must be given where the step has that norm, and nowhere else")
            .c_str());
  }
  if (!kind) return std::nullopt;
  const AnyArray array = vector_from(name, weight, -1);
  const size_t n = array.shape(0);
  if (n != one && n != all) {
    throw nb::value_error((std::string(name) + " must have as many values as a head, " +
                           std::to_string(one) + ", or as all, " + std::to_string(all) + ", got " +
                           describe_array(array))
                              .c_str());
  }
  const auto& [epsilon, offset, early] = *kind;
  const DefaultFloats floats;
  return Norm(array.data(), float_of(name, array.dtype()), n, epsilon, offset, early);
}

std::optional<Rotary> rotary_from(nb::handle cosine_, nb::handle sine_, size_t depth) {
  if (cosine_.is_none() != sine_.is_none()) {
    throw nb::value_error("cosine and sine must both be given, or neither");
  }
  if (cosine_.is_none()) return std::nullopt;
  const AnyArray cosine = vector_from("cosine", cosine_, -1);
  const size_t n = cosine.shape(0);
  const AnyArray sine = vector_from("sine", sine_, static_cast<int64_t>(n));
  if (n == 0 || n % 2 != 0 || n > depth) {
    throw nb::value_error(
        "cosine must have an even number of values, and no more than a head has columns");
  }
  const DefaultFloats floats;
  return Rotary(cosine.data(), float_of("cosine", cosine.dtype()), sine.data(),
                float_of("sine", sine.dtype()), n);
}

}  // namespace

AnyArray vector_from(const char* name, nb::handle given, int64_t n) {
  AnyArray array = input_from(name, given);
  check_array(name, array, {n});
  if (array.shape(0) > 1 && array.stride(0) != 1) {
    throw nb::value_error((std::string(name) + " must be contiguous").c_str());
  }
  return array;
}

Norm norm_from(const char* name, nb::handle weight, const NormKind& kind, size_t n) {
  const AnyArray array = vector_from(name, weight, static_cast<int64_t>(n));
  const auto& [epsilon, offset, early] = kind;
  const DefaultFloats floats;
  return Norm(array.data(), float_of(name, array.dtype()), n, epsilon, offset, early);
}

AttentionArguments::Room::Room(const char* name, nb::handle given, const Heads& heads,
                               ktk_element type, size_t position)
    : array(output_from(name, given)) {
  check_array(name, array,
              {1, static_cast<int64_t>(heads.shared), -1, static_cast<int64_t>(heads.depth)});
  if (float_of(name, array.dtype()) != type) {
    throw nb::type_error((std::string(name) + " must have the dtype of x").c_str());
  }
  if (position >= array.shape(2)) {
    throw nb::value_error((std::string(name) + " has no row " + std::to_string(position) + ", " +
                           describe_array(array))
                              .c_str());
  }
  past = {array.data(), type, static_cast<size_t>(array.stride(1)),
          static_cast<size_t>(array.stride(2))};
  const bool apart = array.shape(2) == 1 || past.row >= heads.depth;
  if (!apart || (heads.shared > 1 && past.head < heads.depth)) {
    throw nb::value_error((std::string(name) + " must not overlap itself").c_str());
  }
}

AttentionArguments::AttentionArguments(BoundAttention& bound, ktk_element type, nb::handle cosine,
                                       nb::handle sine, nb::handle q_norm_, nb::handle k_norm_,
                                       nb::handle keys_, nb::handle values_, size_t position)
    : keys("keys", keys_, bound.step.heads(), type, position),
      values("values", values_, bound.step.heads(), type, position) {
  const Heads& heads = bound.step.heads();
  q_norm = head_norm("q_norm", q_norm_, bound.q_norm, heads.depth, heads.queries * heads.depth);
  k_norm = head_norm("k_norm", k_norm_, bound.k_norm, heads.depth, heads.shared * heads.depth);
  rotary = rotary_from(cosine, sine, heads.depth);
  call.q_norm = q_norm ? &*q_norm : nullptr;
  call.k_norm = k_norm ? &*k_norm : nullptr;
  call.rotary = rotary ? &*rotary : nullptr;
  call.keys = keys.past;
  call.values = values.past;
  call.position = position;
}

InputRows RouterArguments::weight_of(const Layer& layer, nb::handle given) {
  const size_t hidden = layer.config().hidden;
  AnyArray array = input_from("weight", given);
  check_array("weight", array, {-1, static_cast<int64_t>(hidden)});
  return InputRows("weight", std::move(array), hidden);
}

RouterArguments::RouterArguments(Layer& layer, ktk_element type, nb::handle weight_,
                                 nb::handle bias_, size_t top_k, bool chosen_only,
                                 bool scores_in_f32)
    : weight(weight_of(layer, weight_)),
      block{layer,
            {weight.rows, nullptr, weight.count, layer.config().hidden, chosen_only},
            top_k,
            scores_in_f32 ? ktk_element{KTK_F32} : type} {
  const size_t experts = weight.count;
  if (!bias_.is_none()) {
    bias = vector_from("bias", bias_, static_cast<int64_t>(experts));
    if (float_of("bias", bias->dtype()) != weight.rows.type) {
      throw nb::type_error("bias must have the dtype of weight");
    }
    block.router.bias = static_cast<const char*>(bias->data());
  }
  if (top_k == 0 || top_k > experts) {
    throw nb::value_error(("top_k must be between 1 and " + std::to_string(experts)).c_str());
  }
}

}  // namespace ktk
