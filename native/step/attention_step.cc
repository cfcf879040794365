#include "step/attention_step.h"

#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/floats.h"
#include "ops/select.h"

namespace ktk {
namespace {

// A row of heads, changed where it is.
void turn(char* row, size_t heads, size_t depth, ktk_element type, Norm* norm, Rotary* rotary) {
  const size_t bytes = block_of(type).bytes_of(depth);
  if (norm && norm->n() != depth) {
    (*norm)(row, type, row);
    norm = nullptr;
  }
  for (size_t h = 0; h < heads; ++h, row += bytes) {
    if (norm) (*norm)(row, type, row);
    if (rotary) (*rotary)(row, type, depth, row);
  }
}

// Puts the new row of each shared head where the past ends.
void append(const char* row, const Heads& heads, const Past& past, size_t position) {
  const ktk::Block block = block_of(past.type);
  const size_t bytes = block.bytes_of(heads.depth);
  char* const data = static_cast<char*>(const_cast<void*>(past.data));
  for (size_t h = 0; h < heads.shared; ++h) {
    std::memcpy(data + block.bytes_of(h * past.head + position * past.row), row + h * bytes, bytes);
  }
}

}  // namespace

AttentionStep::AttentionStep(std::shared_ptr<Linear> q, std::shared_ptr<Linear> k,
                             std::shared_ptr<Linear> v, std::shared_ptr<Linear> out,
                             const Heads& heads)
    : q_(std::move(q)), k_(std::move(k)), v_(std::move(v)), out_(std::move(out)), heads_(heads) {
  if (heads.depth == 0 || heads.shared == 0 || heads.queries % heads.shared != 0 ||
      heads.queries == 0) {
    throw std::invalid_argument("heads must be a multiple of the heads that they share");
  }
  const size_t shared = product(heads.shared, heads.depth);
  if (q_->n() != product(heads.queries, heads.depth) || k_->n() != shared || v_->n() != shared ||
      out_->k() != q_->n()) {
    throw std::invalid_argument("the layers of attention have other widths than its heads");
  }
  for (const std::shared_ptr<Linear>& one : {k_, v_, out_}) {
    if (one->engine() != q_->engine() || (one != out_ && one->k() != q_->k())) {
      throw std::invalid_argument("the layers of attention must have one input and one pool");
    }
  }
}

void AttentionStep::attend(const Call& call, const Rows& out) {
  const ktk_element type = call.x.type;
  const ktk::Block block = block_of(type);
  const size_t queries = q_->n(), shared = k_->n();
  std::vector<char> memory(block.bytes_of(queries + 2 * shared));
  char* const q = memory.data();
  char* const k = q + block.bytes_of(queries);
  char* const v = k + block.bytes_of(shared);
  Linear* const layers[] = {q_.get(), k_.get(), v_.get()};
  const Rows outs[] = {{q, type, queries}, {k, type, shared}, {v, type, shared}};
  Linear::forward_few(layers, call.x, outs, 1);
  const DefaultFloats floats;
  turn(q, heads_.queries, heads_.depth, type, call.q_norm, call.rotary);
  turn(k, heads_.shared, heads_.depth, type, call.k_norm, call.rotary);
  append(k, heads_, call.keys, call.position);
  append(v, heads_, call.values, call.position);
  std::vector<float> query(queries), mean(queries);
  ops().to_f32(q, type, queries, query.data());
  {
    Engine& engine = *q_->engine();
    const auto turn = engine.turn();
    ktk::attend(engine, heads_, query.data(), call.keys, call.values, call.position + 1,
                mean.data());
  }
  ops().from_f32(mean.data(), out.type, queries, out.data);
}

void AttentionStep::forward(const Call& call, const Rows& out) {
  std::vector<char> mean(call.x.bytes_of(q_->n()));
  const Rows row{mean.data(), call.x.type, q_->n()};
  attend(call, row);
  out_->forward(row, out, 1);
}

}  // namespace ktk
