#include "dense/weights.h"

#include <algorithm>

#include "core/size.h"
#include "core/worker_pool.h"
#include "format/format.h"
#include "moe/carver.h"
#include "moe/cuts.h"
#include "moe/packing.h"
#include "ops/select.h"

namespace ktk {
namespace {

// Where the rows of a part may be cut.
CutRules cut_rules(const Variant& variant, const DensePart& part) {
  CutRules rules;
  rules.step = variant.tile.n_step;
  for (const ktk_format& format : {*part.stored, part.source.format}) {
    if (format.group_n && has_groups(format)) rules.groups.push_back(format.group_n);
  }
  return rules;
}

}  // namespace

size_t DenseWeights::most_shards(const Variant& variant, std::span<const DensePart> parts) {
  size_t most = 1;
  for (const DensePart& part : parts) {
    most = std::max(most, ktk::most_shards(part.n, cut_rules(variant, part)));
  }
  return most;
}

DenseWeights::DenseWeights(const Variant& variant, std::span<const DensePart> parts, size_t k,
                           const std::vector<int>& nodes, WorkerPool& pool)
    : variant_(variant), k_(k) {
  place(variant, parts, nodes);
  std::vector<size_t> first_row(parts.size());
  for (size_t p = 1; p < parts.size(); ++p) first_row[p] = first_row[p - 1] + parts[p - 1].n;
  std::vector<PackJob> jobs;
  for (size_t s = 0; s < shards_.size(); ++s) {
    for (DenseSlice& slice : shards_[s].slices) {
      const size_t row = slice.begin - first_row[slice.part];
      jobs.push_back({&slice.matrix, view(parts[slice.part].source, row, 0), nodes[s]});
      by_column_.push_back(&slice);
    }
  }
  find_sizes(variant, pool, jobs);
  size_t next = 0;
  for (size_t s = 0; s < shards_.size(); ++s) {
    DenseShard& shard = shards_[s];
    Carver pieces;
    std::vector<size_t> at;
    for (size_t i = 0; i < shard.slices.size(); ++i) at.push_back(pieces.add(jobs[next + i].bytes));
    shard.memory = Memory(pieces.size(), nodes[s]);
    pieces.guard(shard.memory.data());
    for (size_t i = 0; i < shard.slices.size(); ++i) {
      PackJob& job = jobs[next++];
      DenseSlice& slice = shard.slices[i];
      slice.packed = job.packed = shard.memory.data() + at[i];
      slice.bytes = job.bytes;
    }
  }
  pack(variant, pool, jobs);
  std::sort(by_column_.begin(), by_column_.end(),
            [](const DenseSlice* a, const DenseSlice* b) { return a->begin < b->begin; });
  const auto has_bias = [](const DensePart& part) { return part.bias != nullptr; };
  if (std::any_of(parts.begin(), parts.end(), has_bias)) bias_.resize(n_);
  for (size_t p = 0; p < parts.size(); ++p) {
    if (parts[p].bias) std::copy_n(parts[p].bias, parts[p].n, bias_.data() + first_row[p]);
  }
}

// Cuts parts into shards and slices.
void DenseWeights::place(const Variant& variant, std::span<const DensePart> parts,
                         const std::vector<int>& nodes) {
  shards_.resize(nodes.size());
  for (size_t p = 0; p < parts.size(); ++p) {
    const DensePart& part = parts[p];
    const CutRules rules = cut_rules(variant, part);
    const size_t pieces = std::min(nodes.size(), ktk::most_shards(part.n, rules));
    const std::vector<size_t> cuts = cut_shards(part.n, pieces, rules);
    for (size_t i = 0; i < pieces; ++i) {
      const std::vector<size_t> at = cut_slices(cuts[i], cuts[i + 1], rules.groups);
      for (size_t s = 0; s + 1 < at.size(); ++s) {
        DenseSlice slice{.part = p, .begin = n_ + at[s], .end = n_ + at[s + 1]};
        slice.matrix = {at[s + 1] - at[s], k_, *part.stored};
        slice.act = act_of(variant, slice.matrix, part.order);
        slice.factor = part.factor;
        // Parts that are too small for all nodes take the places of those that are not in turn.
        shards_[i * nodes.size() / pieces].slices.push_back(slice);
      }
    }
    n_ += part.n;
    formats_.push_back(*part.stored);
  }
}

// Which of acts_ a matrix is multiplied with; a new one where none will do.
size_t DenseWeights::act_of(const Variant& variant, const ktk_matrix& matrix, const Order& order) {
  for (size_t i = 0; i < acts_.size(); ++i) {
    if (variant.share_acts(acts_[i].matrix, matrix) && same(acts_[i].order, order)) return i;
  }
  acts_.push_back({matrix, order});
  return acts_.size() - 1;
}

bool DenseWeights::has_orders() const {
  return std::any_of(acts_.begin(), acts_.end(),
                     [](const DenseAct& act) { return act.order != nullptr; });
}

void DenseWeights::unpack(float* out) const {
  for (const DenseSlice* slice : by_column_) {
    float* const rows = out + slice->begin * k_;
    const ktk_matrix& matrix = slice->matrix;
    variant_.unpack_weight(&matrix, slice->packed, 0, matrix.n, rows, k_);
    if (slice->factor != 1) ops().scale(slice->factor, matrix.n, k_, rows, k_);
    restore_columns(order_of(*slice), matrix.n, rows, k_);
  }
}

void DenseWeights::write_part(size_t part, const ktk_export& target) const {
  size_t row = 0;
  for (const DenseSlice* slice : by_column_) {
    if (slice->part != part) continue;
    // A slice begins where a group of rows does.
    const size_t group_n = slice->matrix.format.group_n, group = group_n ? row / group_n : 0;
    const auto at = [](void* data, size_t bytes) {
      return data ? static_cast<char*>(data) + bytes : nullptr;
    };
    ktk_export own = target;
    own.data = at(target.data, row * target.data_stride);
    own.scale = at(target.scale, group * target.scale_stride);
    own.zero = at(target.zero, group * target.zero_stride);
    variant_.export_weight(&slice->matrix, slice->packed, 0, slice->matrix.n, &own);
    row += slice->matrix.n;
  }
}

const DenseSlice& DenseWeights::slice_of(size_t column) const {
  const auto behind =
      std::upper_bound(by_column_.begin(), by_column_.end(), column,
                       [](size_t value, const DenseSlice* slice) { return value < slice->begin; });
  return **(behind - 1);
}

size_t DenseWeights::bytes() const {
  size_t bytes = 0;
  for (const DenseSlice* slice : by_column_) bytes += slice->bytes;
  return bytes;
}

}  // namespace ktk
