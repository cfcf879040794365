#include "moe/weights.h"

#include <algorithm>
#include <utility>

#include "core/size.h"
#include "core/worker_pool.h"
#include "format/elements.h"
#include "format/format.h"
#include "moe/packing.h"
#include "ops/select.h"

namespace ktk {
namespace {

constexpr size_t kPage = 4096;

// Columns of a whole block; the group of ggml's types is their block.
size_t depth_block(const ktk_format& format) {
  const size_t block = std::max<size_t>(block_of(format.element).columns, 1);
  return is_ggml(format.element) && format.group_k ? common_multiple(block, format.group_k) : block;
}

// Columns of the intermediate size that share a scale of any matrix: rows of gate and up.
std::vector<size_t> groups_in(const Parts<ktk_format>& formats) {
  std::vector<size_t> groups;
  const auto add = [&](const ktk_format& format, uint32_t group) {
    if (group && has_groups(format)) groups.push_back(group);
  };
  add(formats.gate, formats.gate.group_n);
  add(formats.up, formats.up.group_n);
  add(formats.down, formats.down.group_k);
  return groups;
}

void check_block(size_t block, size_t cut) {
  if (cut % block == 0) return;
  throw std::invalid_argument("down has blocks of " + std::to_string(block) +
                              ", but the layer is split into shards at " + std::to_string(cut) +
                              ": load an expert with these blocks first, or use fewer shards");
}

void check_cut(const char* name, const ktk_format& format, size_t group, const Slice& slice) {
  if (group == 0 || !has_groups(format) || slice.begin % group == 0) return;
  if (slice.begin / group == (slice.end - 1) / group) return;
  throw std::invalid_argument(std::string(name) + " has groups of " + std::to_string(group) +
                              ", but the layer is split into shards at " +
                              std::to_string(slice.begin) +
                              ": load an expert with these groups first, or use fewer shards");
}

const char* data_of(const ktk_source& source) { return static_cast<const char*>(source.data); }

// Whether there is something between rows of a matrix, such as those of another.
bool has_gaps(const ExpertSource& source, const Config& config) {
  const auto gaps = [](const ktk_source& one, size_t k) {
    return one.data_stride != block_of(one.format.element).bytes_of(k);
  };
  return gaps(source.gate, config.hidden) || gaps(source.up, config.hidden) ||
         gaps(source.down, config.intermediate);
}

}  // namespace

CutRules cut_rules(const ktk_tile& tile, const Parts<ktk_format>& stored,
                   const ExpertSource& given) {
  CutRules rules;
  rules.block = common_multiple(depth_block(stored.down), depth_block(given.down.format));
  rules.step = common_multiple(tile.n_step, tile.k_step);
  rules.groups = groups_in(stored);
  const Parts<ktk_format> formats = {given.gate.format, given.up.format, given.down.format};
  for (const size_t group : groups_in(formats)) rules.groups.push_back(group);
  return rules;
}

Slice::Place::Place(const Parts<size_t>& bytes_) : bytes(bytes_) {
  at.gate = pieces.add(bytes.gate);
  at.up = pieces.add(bytes.up);
  at.down = pieces.add(bytes.down);
}

void Slice::make_room(size_t expert, const Parts<size_t>& needed) {
  const Parts<size_t>& bytes = place.bytes;
  const bool fits = needed.gate <= bytes.gate && needed.up <= bytes.up && needed.down <= bytes.down;
  if (!fits) {
    Own larger = {{}, Place(needed)};
    larger.memory = Memory(larger.place.pieces.size(), node);
    own.resize(memory.size() / expert_bytes);
    own[expert] = std::move(larger);
    memory.discard(expert * expert_bytes, expert_bytes);
  } else if (!own.empty()) {
    own[expert] = {};
  }
  place_of(expert).pieces.guard(memory_of(expert));
}

void Slice::discard(size_t expert) {
  memory.discard(expert * expert_bytes, expert_bytes);
  if (!own.empty()) own[expert] = {};
}

Slice::Range Slice::neighbours(size_t expert) const {
  const Memory::Range filled = memory.touched(expert * expert_bytes, expert_bytes);
  return {filled.begin / expert_bytes, (filled.end + expert_bytes - 1) / expert_bytes};
}

Weights::Weights(const Config& config, const Variant& variant, const Parts<ktk_format>& formats,
                 const ExpertSource& first, const std::vector<int>& nodes)
    : config_(config),
      variant_(variant),
      formats_(formats),
      states_(config.num_experts, State::kMissing),
      scales_differ_(config.num_experts, 0),
      factors_(config.num_experts, {1, 1, 1}),
      orders_(config.num_experts) {
  const CutRules rules = cut_rules(variant.tile, formats, first);
  const size_t most = most_shards(config.intermediate, rules);
  if (nodes.size() > most) {
    throw std::invalid_argument("intermediate_size " + std::to_string(config.intermediate) +
                                " can be split into at most " + std::to_string(most) +
                                " shards of " + std::to_string(least_step(rules)) + ", not " +
                                std::to_string(nodes.size()));
  }
  const std::vector<size_t> cuts = cut_shards(config.intermediate, nodes.size(), rules);
  for (size_t s = 0; s < nodes.size(); ++s) {
    const std::vector<size_t> at = cut_slices(cuts[s], cuts[s + 1], rules.groups);
    shards_.push_back({slices_.size(), slices_.size() + at.size() - 1});
    for (size_t i = 0; i + 1 < at.size(); ++i) add_slice(at[i], at[i + 1], nodes[s]);
  }
}

void Weights::add_slice(size_t begin, size_t end, int node) {
  Slice slice;
  slice.begin = begin;
  slice.end = end;
  slice.matrix = {{config_.gated ? slice.width() : 0, config_.hidden, formats_.gate},
                  {slice.width(), config_.hidden, formats_.up},
                  {config_.hidden, slice.width(), formats_.down}};
  slice.place = Slice::Place({config_.gated ? variant_.weight_bytes(slice.matrix.gate) : 0,
                              variant_.weight_bytes(slice.matrix.up),
                              variant_.weight_bytes(slice.matrix.down)});
  slice.expert_bytes = round_up(slice.place.pieces.size(), kPage);
  slice.memory = Memory(product(config_.num_experts, slice.expert_bytes), node);
  slice.node = node;
  slices_.push_back(std::move(slice));
}

void Weights::set_bias(std::vector<float>& all, const float* bias, size_t expert, size_t n) {
  if (!bias && all.empty()) return;
  if (all.empty()) all.resize(product(config_.num_experts, n));
  float* at = all.data() + expert * n;
  if (bias) {
    std::copy_n(bias, n, at);
  } else {
    std::fill_n(at, n, 0.0f);
  }
}

void Weights::load(size_t expert, const ExpertSource& source, WorkerPool& pool) {
  for (const Slice& slice : slices_) {
    const ktk_format &gate = source.gate.format, &up = source.up.format, &down = source.down.format;
    check_block(depth_block(down), slice.begin);
    check_cut("gate", gate, gate.group_n, slice);
    check_cut("up", up, up.group_n, slice);
    check_cut("down", down, down.group_k, slice);
  }
  for (Slice& slice : slices_) {
    if (gaps_) slice.memory.wish_huge(true);
  }
  std::vector<PackJob> jobs;
  for (const Slice& slice : slices_) {
    jobs.push_back({&slice.matrix.gate, view(source.gate, slice.begin, 0), slice.node});
    jobs.push_back({&slice.matrix.up, view(source.up, slice.begin, 0), slice.node});
    jobs.push_back({&slice.matrix.down, view(source.down, 0, slice.begin), slice.node});
  }
  // A size may depend on what is in a matrix, and columns that are cut share rows with others.
  const bool all_ahead = variant_.source_size || has_gaps(source, config_);
  std::vector<Unread> ahead, unread;
  for (const Unread& one : source.unread) {
    const bool is_cut = slices_.size() > 1 && is_unread(data_of(source.down), {&one, 1});
    (all_ahead || is_cut ? ahead : unread).push_back(one);
  }
  read_all(ahead, pool);
  find_sizes(variant_, pool, jobs);
  try {
    fill(expert, source, jobs, unread, pool);
  } catch (...) {
    // What is there may be of this expert and of one before.
    discard(expert, states_[expert] == State::kLeftOut ? State::kLeftOut : State::kUnloaded);
    throw;
  }
  if (gaps_) keep_gaps(expert);
}

// Writes an expert, which is loaded then.
void Weights::fill(size_t expert, const ExpertSource& source, std::span<PackJob> jobs,
                   std::span<const Unread> unread, WorkerPool& pool) {
  for (size_t s = 0; s < slices_.size(); ++s) {
    Slice& slice = slices_[s];
    PackJob &gate = jobs[3 * s], &up = jobs[3 * s + 1], &down = jobs[3 * s + 2];
    slice.make_room(expert, {gate.bytes, up.bytes, down.bytes});
    const Parts<size_t>& bytes = slice.place_of(expert).bytes;
    gate.packed = slice.gate_at(expert), gate.bytes = bytes.gate;
    up.packed = slice.up_at(expert), up.bytes = bytes.up;
    down.packed = slice.down_at(expert), down.bytes = bytes.down;
  }
  pack(variant_, pool, jobs, unread);
  check_unchanged(source.unread);
  set_bias(gate_bias_, source.gate_bias, expert, config_.intermediate);
  set_bias(up_bias_, source.up_bias, expert, config_.intermediate);
  set_bias(down_bias_, source.down_bias, expert, config_.hidden);
  scales_differ_[expert] = chooses_scales(source);
  factors_[expert] = source.factor;
  const Parts<Order>& order = source.order;
  orders_[expert] = {};  // what was there is not shared
  orders_[expert].up = shared(order.up);
  orders_[expert].gate = config_.gated ? shared(order.gate) : orders_[expert].up;
  orders_[expert].down = shared(order.down);
  states_[expert] = State::kLoaded;
  compare_orders();
}

// Huge pages of a loaded expert may reach into experts that have no memory: gives that back, and
// keeps the system from filling the gaps again.
void Weights::keep_gaps(size_t expert) {
  for (Slice& slice : slices_) {
    const Slice::Range near = slice.neighbours(expert);
    for (size_t e = near.first; e < near.last; ++e) {
      if (states_[e] == State::kLeftOut || states_[e] == State::kUnloaded) slice.discard(e);
    }
    slice.memory.wish_huge(false);
  }
}

// An order that some expert has already, or the one that is given.
Order Weights::shared(const Order& order) const {
  for (const Parts<Order>& known : orders_) {
    for (const Order* const one : {&known.gate, &known.up, &known.down}) {
      if (same(*one, order)) return *one;
    }
  }
  return order;
}

void Weights::compare_orders() {
  has_orders_ = gate_up_orders_differ_ = expert_orders_differ_ = false;
  const Parts<Order>* first = nullptr;
  for (size_t expert = 0; expert < states_.size(); ++expert) {
    if (states_[expert] != State::kLoaded) continue;
    const Parts<Order>& own = orders_[expert];
    if (!first) first = &own;
    has_orders_ |= own.gate || own.up;
    gate_up_orders_differ_ |= own.gate != own.up;
    expert_orders_differ_ |= own.gate != first->gate || own.up != first->up;
  }
}

// Whether packing a source in slices chooses several scales for a group of what is stored.
bool Weights::chooses_scales(const ExpertSource& source) const {
  const auto chosen = [&](const ktk_format& given, const ktk_format& stored, size_t group) {
    if (has_groups(given) || !has_groups(stored)) return false;
    return std::any_of(slices_.begin(), slices_.end(), [&](const Slice& slice) {
      return group ? slice.begin % group : slice.begin;
    });
  };
  return chosen(source.gate.format, formats_.gate, formats_.gate.group_n) ||
         chosen(source.up.format, formats_.up, formats_.up.group_n) ||
         chosen(source.down.format, formats_.down, formats_.down.group_k);
}

void Weights::discard(size_t expert, State state) {
  for (Slice& slice : slices_) {
    slice.discard(expert);
    if (!gaps_) slice.memory.wish_huge(false);
  }
  gaps_ = true;
  states_[expert] = state;
  orders_[expert] = {};
  compare_orders();
}

void Weights::unpack(size_t expert, float* gate, float* up, float* down) const {
  for (const Slice& s : slices_) {
    const auto write = [&](const ktk_matrix& matrix, const char* packed, float factor, float* out,
                           size_t stride) {
      if (matrix.n == 0) return;
      variant_.unpack_weight(&matrix, packed, 0, matrix.n, out, stride);
      if (factor != 1) ops().scale(factor, matrix.n, matrix.k, out, stride);
    };
    const size_t at = s.begin * config_.hidden;
    const Parts<float>& factor = factors_[expert];
    write(s.matrix.gate, s.gate_at(expert), factor.gate, gate + at, config_.hidden);
    write(s.matrix.up, s.up_at(expert), factor.up, up + at, config_.hidden);
    write(s.matrix.down, s.down_at(expert), factor.down, down + s.begin, config_.intermediate);
  }
  const Parts<Order>& order = orders_[expert];
  for (const auto& [columns, out] : {std::pair{&order.gate, gate}, std::pair{&order.up, up}}) {
    if (out == gate && !config_.gated) continue;
    restore_columns(*columns, config_.intermediate, out, config_.hidden);
    restore_rows(order.down, config_.hidden, out);
  }
  restore_columns(order.down, config_.hidden, down, config_.intermediate);
}

size_t Weights::expert_bytes() const {
  size_t bytes = 0;
  for (const Slice& s : slices_) {
    const Parts<size_t>& of = s.place.bytes;
    bytes += of.gate + of.up + of.down;
  }
  return bytes;
}

size_t Weights::bytes() const {
  size_t bytes = 0;
  for (const Slice& s : slices_) {
    for (size_t expert = 0; expert < states_.size(); ++expert) {
      if (states_[expert] != State::kLoaded) continue;
      const Parts<size_t>& of = s.place_of(expert).bytes;
      bytes += of.gate + of.up + of.down;
    }
  }
  return bytes;
}

}  // namespace ktk
