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
constexpr size_t kPackedRows = 256;  // of a task that packs
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
    const std::vector<Group> groups = cut_groups();
    place(groups);
    std::memset(sums(0), 0, tokens_ * weights_.k() * sizeof(float));
    for (const Group& group : groups) run_group(group);
    each(tokens_, [&](size_t token, char*) {
      ops().from_f32(sums(token), dx_.type, weights_.k(), dx_.at(begin_ + token));
    });
  }

 private:
  // Rows of a slice, which begin at a column of dy, and where they are in the depth of a group's
  // matrix.
  struct Piece {
    WeightRows rows;
    size_t column, depth;
  };
  struct Group {
    std::vector<Piece> pieces;
    size_t depth = 0;
    TransposedMatrix matrix;
  };

  template <typename Task>
  void each(size_t count, Task task) {
    ktk::each(engine_, transposing_.variant(), own_.pieces, count, task);
  }

  float* sums(size_t token) const {
    return reinterpret_cast<float*>(shared_ + sums_at_) + token * weights_.k();
  }

  std::vector<Group> cut_groups() const {
    const size_t row_bytes = product(weights_.k(), sizeof(uint16_t));
    const size_t step = round_up(kPackedRows, transposing_.rows());
    const size_t most = round_up(std::max(kGroupBytes / row_bytes, step), step);
    std::vector<Group> groups(1);
    for (const DenseSlice* slice : slices_) {
      for (size_t begin = 0; begin < slice->matrix.n; begin += step) {
        const size_t end = std::min(begin + step, slice->matrix.n);
        if (Transposing::pad_depth(groups.back().depth) >= most) groups.emplace_back();
        Group& group = groups.back();
        const size_t depth = Transposing::pad_depth(group.depth);
        group.pieces.push_back(
            {{&slice->matrix, slice->packed, slice->factor, weights_.order_of(*slice), begin, end},
             slice->begin + begin,
             depth});
        group.depth = depth + end - begin;
      }
    }
    for (Group& group : groups) group.matrix = transposing_.matrix(weights_.k(), group.depth);
    return groups;
  }

  // Groups have memory from the same places on.
  void place(const std::vector<Group>& groups) {
    size_t weights = 0, acts = 0, scratch = 0, wide = 0;
    for (const Group& group : groups) {
      weights = std::max(weights, group.matrix.bytes);
      acts = std::max(acts, group.matrix.act_bytes);
      scratch = std::max(scratch, transposing_.scratch_bytes(group.matrix, kMaxRows));
    }
    for (const DownTask& task : columns_) wide = std::max<size_t>(wide, task.end - task.begin);
    Carver shared, own;
    sums_at_ = shared.add(tokens_, product(weights_.k(), sizeof(float)));
    weights_at_ = shared.add(weights);
    acts_at_ = shared.add(tokens_ + transposing_.variant().tile.m_step, acts);
    shared_ = engine_.scratch.shared(shared);
    own_ = {};
    own_.stride = odd_stride(round_up(wide, transposing_.variant().tile.n_step));
    own_.row = own.add(round_up(kPackedRows, transposing_.rows()), sizeof(float));
    own_.panel = own.add(transposing_.pad(kMaxRows), own_.stride * sizeof(float));
    own_.scratch = own.add(scratch);
    own_.pack = own.add(transposing_.own());
    own_.pieces = std::move(own);
  }

  void run_group(const Group& group) {
    char *const weights = shared_ + weights_at_, *const acts = shared_ + acts_at_;
    const size_t act_bytes = group.matrix.act_bytes, pieces = group.pieces.size();
    each(pieces + tokens_, [&](size_t i, char* own) {
      if (i >= pieces) return encode(group, i - pieces, acts + (i - pieces) * act_bytes, own);
      const Piece& piece = group.pieces[i];
      transposing_.pack(piece.rows, group.matrix, piece.depth, weights, own + own_.pack);
    });
    const size_t row_blocks = groups_of(tokens_, kMaxRows);
    each(row_blocks * columns_.size(), [&](size_t i, char* own) {
      const DownTask& task = columns_[i / row_blocks];
      const size_t first = i % row_blocks * kMaxRows, m = std::min(tokens_ - first, kMaxRows);
      float* const panel = reinterpret_cast<float*>(own + own_.panel);
      transposing_.multiply(group.matrix, weights, m, acts + first * act_bytes, task.begin,
                            task.end, panel, own_.stride, own + own_.scratch);
      for (size_t r = 0; r < m; ++r) {
        ops().add(panel + r * own_.stride, task.end - task.begin, sums(first + r) + task.begin);
      }
    });
  }

  // One row of dy, for a group's matrix.
  void encode(const Group& group, size_t token, char* act, char* own) const {
    float* const row = reinterpret_cast<float*>(own + own_.row);
    for (const Piece& piece : group.pieces) {
      const size_t count = piece.rows.end - piece.rows.begin;
      const size_t end = std::min(piece.depth + Transposing::pad_depth(count), group.depth);
      ops().to_f32(dy_.at(begin_ + token, piece.column), dy_.type, count, row);
      std::fill(row + count, row + (end - piece.depth), 0.0f);
      transposing_.encode(group.matrix, 1, piece.depth, end, row, end - piece.depth, act);
    }
  }

  Engine& engine_;
  const DenseWeights& weights_;
  const Rows &dy_, &dx_;
  Transposing transposing_;
  std::vector<const DenseSlice*> slices_;
  std::vector<DownTask> columns_;
  size_t begin_ = 0, tokens_ = 0;  // of the chunk
  size_t sums_at_ = 0, weights_at_ = 0, acts_at_ = 0;
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
