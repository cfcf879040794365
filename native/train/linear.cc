#include "train/linear.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/size.h"
#include "moe/schedule.h"
#include "ops/select.h"
#include "train/workers.h"

namespace ktk {
namespace {

constexpr size_t kMaxRows = 256;
constexpr size_t kMostColumns = 512;
constexpr size_t kGroupBytes = size_t{48} << 20;
constexpr size_t kChunkTokens = 2048;

class LinearBackward {
 public:
  LinearBackward(Engine& engine, const Variant& variant, const DenseWeights& weights,
                 const FloatBackend& floats, const Rows& dy, const Rows& dx)
      : engine_(engine),
        weights_(weights),
        dy_(dy),
        dx_(dx),
        transposing_(variant, floats, weights.k()) {
    for (const DenseShard& shard : weights.shards()) {
      for (const DenseSlice& slice : shard.slices) {
        slices_.push_back(&slice);
      }
    }
    // By column, so that sums do not depend on the memory that parts are in.
    std::sort(slices_.begin(), slices_.end(),
              [](const DenseSlice* a, const DenseSlice* b) { return a->begin < b->begin; });
    cut_down(weights.k(), transposing_.variant().tile.n_step, kMostColumns, engine.pool.size(),
             columns_);
  }

  void run(size_t begin, size_t end) {
    begin_ = begin;
    tokens_ = end - begin;
    std::vector<Group> groups = cut_groups();
    place(groups);
    std::memset(sums(0), 0, tokens_ * weights_.k() * sizeof(float));
    for (Group& group : groups) run_group(group);
    each(tokens_, [&](size_t token, char*) {
      ops().from_f32(sums(token), dx_.type, weights_.k(), dx_.at(begin_ + token));
    });
  }

 private:
  struct Group {
    std::vector<TransposedBlock> blocks;
    std::vector<size_t> columns;  // of dy, that each block begins at
    std::vector<size_t> acts;     // where its encoded rows are
    Carver pieces;
  };

  template <typename Task>
  void each(size_t count, Task task) {
    ktk::each(engine_, transposing_.variant(), own_.pieces, count, task);
  }

  float* sums(size_t token) const {
    return reinterpret_cast<float*>(shared_ + sums_at_) + token * weights_.k();
  }

  // Each group has memory from the same place on.
  std::vector<Group> cut_groups() const {
    std::vector<Group> groups;
    const size_t rows = tokens_ + transposing_.variant().tile.m_step;
    for (const DenseSlice* slice : slices_) {
      for (size_t i = 0; i < transposing_.count(slice->matrix.n); ++i) {
        TransposedBlock block = transposing_.block(slice->matrix, i);
        block.packed = slice->packed;
        block.factor = slice->factor;
        if (groups.empty() || groups.back().pieces.size() > kGroupBytes) groups.emplace_back();
        Group& group = groups.back();
        block.at = group.pieces.add(block.bytes);
        group.acts.push_back(group.pieces.add(rows, block.act_bytes));
        group.columns.push_back(slice->begin + block.begin);
        group.blocks.push_back(block);
      }
    }
    return groups;
  }

  void place(const std::vector<Group>& groups) {
    size_t most = 0, scratch = 0, wide = 0;
    for (const Group& group : groups) {
      most = std::max(most, group.pieces.size());
      scratch = std::max(scratch, transposing_.scratch_bytes(group.blocks, kMaxRows));
    }
    for (const DownTask& task : columns_) wide = std::max<size_t>(wide, task.end - task.begin);
    Carver shared, own;
    sums_at_ = shared.add(tokens_, product(weights_.k(), sizeof(float)));
    group_at_ = shared.add(most);
    shared_ = engine_.scratch.shared(shared);
    own_ = {};
    own_.stride = odd_stride(round_up(wide, transposing_.variant().tile.n_step));
    own_.row = own.add(transposing_.depth(), sizeof(float));
    own_.panel = own.add(transposing_.pad(kMaxRows), own_.stride * sizeof(float));
    own_.scratch = own.add(scratch);
    own_.pack = own.add(transposing_.own());
    own_.pieces = std::move(own);
  }

  void run_group(const Group& group) {
    char* const memory = shared_ + group_at_;
    group.pieces.guard(memory);
    const Variant& variant = transposing_.variant();
    const size_t count = group.blocks.size();
    each(2 * count, [&](size_t i, char* own) {
      const TransposedBlock& block = group.blocks[i / 2];
      if (i % 2 == 0) return transposing_.pack(block, memory, own + own_.pack);
      float* const row = reinterpret_cast<float*>(own + own_.row);
      const size_t column = group.columns[i / 2], depth = block.matrix.k;
      for (size_t token = 0; token < tokens_; ++token) {
        ops().to_f32(dy_.at(begin_ + token, column), dy_.type, depth, row);
        variant.pack_act(&block.matrix, 1, 0, depth, row, depth,
                         memory + group.acts[i / 2] + token * block.act_bytes, block.act_bytes);
      }
    });
    const size_t row_blocks = groups_of(tokens_, kMaxRows);
    each(row_blocks * columns_.size(), [&](size_t i, char* own) {
      const DownTask& task = columns_[i / row_blocks];
      const size_t first = i % row_blocks * kMaxRows, m = std::min(tokens_ - first, kMaxRows);
      float* const panel = reinterpret_cast<float*>(own + own_.panel);
      for (size_t b = 0; b < count; ++b) {
        const TransposedBlock& block = group.blocks[b];
        const char* const act = memory + group.acts[b] + first * block.act_bytes;
        transposing_.multiply(block, memory, m, act, task.begin, task.end, panel, own_.stride,
                              own + own_.scratch);
        for (size_t r = 0; r < m; ++r) {
          ops().add(panel + r * own_.stride, task.end - task.begin, sums(first + r) + task.begin);
        }
      }
    });
  }

  Engine& engine_;
  const DenseWeights& weights_;
  const Rows &dy_, &dx_;
  Transposing transposing_;
  std::vector<const DenseSlice*> slices_;
  std::vector<DownTask> columns_;
  size_t begin_ = 0, tokens_ = 0;  // of the chunk
  size_t sums_at_ = 0, group_at_ = 0;
  char* shared_ = nullptr;
  struct {
    size_t row = 0, panel = 0, scratch = 0, pack = 0, stride = 0;
    Carver pieces;
  } own_;
};

}  // namespace

void backward(Linear& linear, const FloatBackend& floats, const Rows& dy, const Rows& dx,
              size_t tokens) {
  linear.compute([&](const DenseWeights& weights) {
    LinearBackward run(*linear.engine(), linear.variant(), weights, floats, dy, dx);
    for (size_t begin = 0; begin < tokens; begin += kChunkTokens) {
      run.run(begin, std::min(begin + kChunkTokens, tokens));
    }
  });
}

}  // namespace ktk
