#include "step/layer_step.h"

#include <vector>

#include "core/floats.h"
#include "core/size.h"
#include "ops/select.h"

namespace ktk {

void RoutedExperts::forward(const Rows& x, size_t tokens, const Rows& out) const {
  std::vector<char> logits(product(tokens, x.bytes_of(router.experts)));
  std::vector<float> rounded(product(tokens, top_k)), weights(rounded.size());
  std::vector<int64_t> ids(weights.size());
  {
    const DefaultFloats floats;
    const auto turn = experts.engine()->turn();
    choose_experts(router, x, tokens, top_k, {logits.data(), x.type, router.experts},
                   {rounded.data(), scores, top_k}, ids.data(), experts.engine().get());
    ops().to_f32(rounded.data(), scores, weights.size(), weights.data());
  }
  Request request;
  request.hidden = x;
  request.out = out;
  request.choice = {ids.data(), true, top_k, weights.data(), top_k, tokens, top_k};
  experts.forward(request);
}

void layer_step(AttentionStep& attention, AttentionStep::Call call, Norm& before, Norm& between,
                const RoutedExperts& block, const Rows& out) {
  const Rows x = call.x;
  const size_t width = before.n(), bytes = x.bytes_of(width);
  std::vector<char> memory(product(3, bytes));
  const Rows normed{memory.data(), x.type, width}, added{normed.at(1), x.type, width},
      sum{normed.at(2), x.type, width};
  const ktk_ops& o = ops();
  {
    const DefaultFloats floats;
    before(x.data, x.type, normed.data);
  }
  call.x = normed;
  attention.forward(call, added);
  {
    const DefaultFloats floats;
    between.of_sum(x.data, added.data, x.type, sum.data, normed.data);
  }
  block.forward(normed, 1, added);
  const DefaultFloats floats;
  std::vector<float> values(width), other(width);
  o.to_f32(sum.data, x.type, width, values.data());
  o.to_f32(added.data, x.type, width, other.data());
  o.add(other.data(), width, values.data());
  o.from_f32(values.data(), x.type, width, out.data);
}

}  // namespace ktk
