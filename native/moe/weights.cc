#include "moe/weights.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/size.h"
#include "core/worker_pool.h"
#include "moe/pipeline.h"

namespace ktk {
namespace {

constexpr size_t kPage = 4096;

// Rows [row, ...) and columns [col, ...) of a source; both are multiples of its group and its
// block.
ktk_source view(const ktk_source& source, size_t row, size_t col) {
  ktk_source part = source;
  const auto move = [](const void*& data, size_t stride, size_t rows, ktk_element element,
                       size_t columns) {
    if (!data) return;
    const size_t offset = rows * stride + block_of(element).bytes_of(columns);
    data = static_cast<const char*>(data) + offset;
  };
  const ktk_format& f = source.format;
  const size_t group_row = f.group_n ? row / f.group_n : 0;
  const size_t group_col = f.group_k ? col / f.group_k : 0;
  move(part.data, source.data_stride, row, f.element, col);
  move(part.scale, source.scale_stride, group_row, f.scale, group_col);
  move(part.zero, source.zero_stride, group_row, f.zero, group_col);
  return part;
}

// What the depth of a matrix can be cut at: whole groups and whole blocks.
size_t depth_step(const ktk_format& format) {
  const size_t block = std::max<size_t>(block_of(format.element).columns, 1);
  return format.group_k ? common_multiple(block, format.group_k) : block;
}

// What the intermediate size may be cut at: whole packed columns of gate and up, whole depth steps
// of down, and whole groups and blocks, of what is stored and of what is given.
size_t cut_step(const ktk_tile& tile, const Parts<ktk_format>& stored, const ExpertSource& given) {
  size_t step = common_multiple(tile.n_step, tile.k_step);
  for (const uint32_t group : {stored.gate.group_n, stored.up.group_n, given.gate.format.group_n,
                               given.up.format.group_n}) {
    if (group) step = common_multiple(step, group);
  }
  for (const ktk_format& format : {stored.down, given.down.format}) {
    step = common_multiple(step, depth_step(format));
  }
  return step;
}

void check_cut(const char* name, size_t group, size_t cut) {
  if (group == 0 || cut % group == 0) return;
  throw std::invalid_argument(std::string(name) + " has groups of " + std::to_string(group) +
                              ", but the layer is split into shards at " + std::to_string(cut) +
                              ": load an expert with these groups first, or use fewer shards");
}

}  // namespace

Weights::Weights(const Config& config, const Variant& variant, const Parts<ktk_format>& formats,
                 const ExpertSource& first, const std::vector<int>& nodes)
    : config_(config),
      variant_(variant),
      formats_(formats),
      states_(config.num_experts, State::kMissing),
      factors_(config.num_experts, {1, 1, 1}) {
  const size_t step = cut_step(variant.tile, formats, first);
  const size_t steps = round_up(config.intermediate, step) / step;
  const size_t parts = nodes.size();
  if (parts > steps) {
    throw std::invalid_argument("intermediate_size " + std::to_string(config.intermediate) +
                                " can be split into at most " + std::to_string(steps) +
                                " shards of " + std::to_string(step) + ", not " +
                                std::to_string(parts));
  }
  for (size_t s = 0; s < parts; ++s) {
    Shard shard;
    shard.begin = steps * s / parts * step;
    shard.end = std::min(steps * (s + 1) / parts * step, config.intermediate);
    shard.matrix = {{shard.width(), config.hidden, formats.gate},
                    {shard.width(), config.hidden, formats.up},
                    {config.hidden, shard.width(), formats.down}};
    shard.bytes = {variant.weight_bytes(shard.matrix.gate), variant.weight_bytes(shard.matrix.up),
                   variant.weight_bytes(shard.matrix.down)};
    shard.expert_bytes =
        round_up(sum(sum(shard.bytes.gate, shard.bytes.up), shard.bytes.down), kPage);
    shard.memory = Memory(product(config.num_experts, shard.expert_bytes), nodes[s]);
    shards_.push_back(std::move(shard));
  }
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
  for (const Shard& shard : shards_) {
    check_cut("gate", source.gate.format.group_n, shard.begin);
    check_cut("up", source.up.format.group_n, shard.begin);
    check_cut("down", depth_step(source.down.format), shard.begin);
  }
  struct Job {
    const ktk_matrix* matrix;
    ktk_source source;
    void* packed;
    size_t begin, end;
  };
  std::vector<Job> jobs;
  const size_t n_step = variant_.tile.n_step;
  const auto add = [&](const ktk_matrix& matrix, const ktk_source& part, void* packed) {
    // A few jobs per worker and matrix: enough to balance, large enough to stream.
    const size_t pieces = static_cast<size_t>(pool.size()) * 4;
    const size_t rows = std::max(round_up(matrix.n / pieces + 1, n_step), n_step);
    for (size_t n = 0; n < matrix.n; n += rows) {
      jobs.push_back({&matrix, part, packed, n, std::min(n + rows, matrix.n)});
    }
  };
  for (const Shard& shard : shards_) {
    add(shard.matrix.gate, view(source.gate, shard.begin, 0), shard.gate_at(expert));
    add(shard.matrix.up, view(source.up, shard.begin, 0), shard.up_at(expert));
    add(shard.matrix.down, view(source.down, 0, shard.begin), shard.down_at(expert));
  }
  std::atomic<size_t> next{0};
  pool.run([&](int) {
    for (size_t i = next.fetch_add(1); i < jobs.size(); i = next.fetch_add(1)) {
      const Job& job = jobs[i];
      variant_.pack_weight(job.matrix, &job.source, job.begin, job.end, job.packed);
    }
  });
  set_bias(gate_bias_, source.gate_bias, expert, config_.intermediate);
  set_bias(up_bias_, source.up_bias, expert, config_.intermediate);
  set_bias(down_bias_, source.down_bias, expert, config_.hidden);
  factors_[expert] = source.factor;
  states_[expert] = State::kLoaded;
}

void Weights::leave_out(size_t expert) {
  for (Shard& shard : shards_) {
    shard.memory.discard(expert * shard.expert_bytes, shard.expert_bytes);
  }
  states_[expert] = State::kLeftOut;
}

void Weights::unpack(size_t expert, float* gate, float* up, float* down) const {
  for (const Shard& s : shards_) {
    const auto write = [&](const ktk_matrix& matrix, const char* packed, float factor, float* out,
                           size_t stride) {
      variant_.unpack_weight(&matrix, packed, 0, matrix.n, out, stride);
      if (factor != 1) ops().scale(factor, matrix.n, matrix.k, out, stride);
    };
    const size_t at = s.begin * config_.hidden;
    const Parts<float>& factor = factors_[expert];
    write(s.matrix.gate, s.gate_at(expert), factor.gate, gate + at, config_.hidden);
    write(s.matrix.up, s.up_at(expert), factor.up, up + at, config_.hidden);
    write(s.matrix.down, s.down_at(expert), factor.down, down + s.begin, config_.intermediate);
  }
}

size_t Weights::expert_bytes() const {
  size_t bytes = 0;
  for (const Shard& s : shards_) bytes += s.bytes.gate + s.bytes.up + s.bytes.down;
  return bytes;
}

size_t Weights::bytes() const {
  const auto loaded = std::count(states_.begin(), states_.end(), State::kLoaded);
  return static_cast<size_t>(loaded) * expert_bytes();
}

}  // namespace ktk
