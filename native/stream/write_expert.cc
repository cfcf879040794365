#include "stream/write_expert.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "core/size.h"
#include "format/elements.h"
#include "format/format.h"

namespace ktk {
namespace {

// 2^(e - 127) is the bits of a bf16, but for 2^-127, which is subnormal, and NaN.
uint16_t bf16_from_ue8m0(uint8_t e) {
  return static_cast<uint16_t>(e == 0 ? 0x0040 : e == 255 ? 0x7fc0 : e << 7);
}

float f32_from_e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, fraction = x & 7;
  float size = std::ldexp(static_cast<float>(exponent ? 8 + fraction : fraction),
                          std::max(exponent, 1) - 10);
  if ((x & 127) == 127) size = std::numeric_limits<float>::quiet_NaN();
  return x & 128 ? -size : size;
}

// Whether scales are folded with the factor of their matrix, and rounded twice: to f32 and to bf16.
bool is_folded(ktk_element scale, bool wide) { return wide && scale == KTK_E4M3; }

// Copies scales as they are or, where they are to be wide, makes bf16 of them.
void put_scales(const char* from, size_t count, ktk_element type, bool wide, float factor,
                char* to) {
  if (!wide || (type != KTK_UE8M0 && type != KTK_E4M3)) {
    std::memcpy(to, from, count * element_bits(type) / 8);
    return;
  }
  for (size_t i = 0; i < count; ++i, to += 2) {
    const auto code = static_cast<uint8_t>(from[i]);
    if (is_folded(type, wide)) {
      const float folded = f32_from_e4m3(code) * factor;
      ops().from_f32(&folded, KTK_BF16, 1, to);
    } else {
      const uint16_t bits = bf16_from_ue8m0(code);
      std::memcpy(to, &bits, sizeof bits);
    }
  }
}

// Rows [begin, end) of a packed matrix, in the stored format.
struct Stored {
  SourceShape shape;
  std::vector<char> data, scale, zero;
};

class Writer {
 public:
  Writer(const Layer& layer, const Weights& weights, size_t expert,
         const std::vector<RankTarget>& ranks, bool wide_scales)
      : layer_(layer),
        weights_(weights),
        expert_(expert),
        ranks_(ranks),
        wide_(wide_scales),
        per_rank_(layer.config().intermediate / ranks.size()) {}

  void run() {
    struct Job {
      const Slice* slice;
      int part;
      size_t begin, end;
    };
    std::vector<Job> jobs;
    for (const Slice& slice : weights_.slices()) {
      for (int part = 0; part < 3; ++part) {
        const ktk_matrix& matrix = matrix_of(slice, part);
        // Packing steps and groups are not cut; a few hundred KiB stay in cache.
        const size_t group = std::max<uint32_t>(matrix.format.group_n, 1);
        const size_t step = common_multiple(layer_.variant().tile.n_step, group);
        for (size_t n = 0; n < matrix.n; n += step) {
          jobs.push_back({&slice, part, n, std::min(n + step, matrix.n)});
        }
      }
    }
    std::atomic<size_t> next{0};
    layer_.engine()->pool.run([&](int) {
      for (size_t i = next.fetch_add(1); i < jobs.size(); i = next.fetch_add(1)) {
        const Job& job = jobs[i];
        const ktk_matrix& matrix = matrix_of(*job.slice, job.part);
        const Stored rows = exported(matrix, packed_of(*job.slice, job.part), job.begin, job.end);
        if (job.part == 2) {
          put_down(*job.slice, matrix, rows, job.begin, job.end);
        } else {
          put_gate(*job.slice, matrix, rows, job.part, job.begin, job.end);
        }
      }
    });
  }

 private:
  static const ktk_matrix& matrix_of(const Slice& slice, int part) {
    return part == 0 ? slice.matrix.gate : part == 1 ? slice.matrix.up : slice.matrix.down;
  }
  const char* packed_of(const Slice& slice, int part) const {
    return part == 0   ? slice.gate_at(expert_)
           : part == 1 ? slice.up_at(expert_)
                       : slice.down_at(expert_);
  }
  const Parts<float>& factor() const { return weights_.factor(expert_); }
  size_t scale_size(const ktk_format& format) const {
    const bool grows = format.scale == KTK_UE8M0 || format.scale == KTK_E4M3;
    return wide_ && grows ? 2 : element_bits(format.scale) / 8;
  }

  Stored exported(const ktk_matrix& matrix, const char* packed, size_t begin, size_t end) const {
    const ktk_format& f = matrix.format;
    const SourceShape shape = source_shape(f, end - begin, matrix.k);
    Stored rows{shape, {}, {}, {}};
    rows.data.resize(product(end - begin, shape.data_bytes));
    rows.scale.resize(product(shape.groups_n, shape.scale_bytes));
    rows.zero.resize(product(shape.groups_n, shape.zero_bytes));
    // The target's row 0 is row 0 of the matrix, which lies before what is kept here.
    const auto first = [](std::vector<char>& all, size_t row, size_t bytes) -> void* {
      return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(all.data()) - row * bytes);
    };
    const size_t group = f.group_n ? begin / f.group_n : 0;
    const ktk_export target = {first(rows.data, begin, shape.data_bytes),
                               first(rows.scale, group, shape.scale_bytes),
                               first(rows.zero, group, shape.zero_bytes),
                               shape.data_bytes,
                               shape.scale_bytes,
                               shape.zero_bytes};
    layer_.variant().export_weight(&matrix, packed, begin, end, &target);
    return rows;
  }

  // Rows of gate or up: a rank has those of its intermediate columns. The scale of a group comes
  // from the slice that the group starts in; the others have the same.
  void put_gate(const Slice& slice, const ktk_matrix& matrix, const Stored& rows, int part,
                size_t begin, size_t end) const {
    const ktk_format& f = matrix.format;
    const size_t group = std::max<uint32_t>(f.group_n, 1);
    const size_t scales = rows.shape.groups_k, scale_bytes = scales * scale_size(f);
    for (size_t n = begin; n < end;) {
      const size_t at = slice.begin + n, rank = at / per_rank_;
      const size_t stop = std::min(end, (rank + 1) * per_rank_ - slice.begin);
      const size_t row = static_cast<size_t>(part) * per_rank_ + at % per_rank_;
      std::memcpy(static_cast<char*>(ranks_[rank].w13) + row * rows.shape.data_bytes,
                  rows.data.data() + (n - begin) * rows.shape.data_bytes,
                  (stop - n) * rows.shape.data_bytes);
      if (f.scale != KTK_NONE && at % group == 0) {
        put_scales(rows.scale.data() + (n - begin) / group * rows.shape.scale_bytes,
                   groups_of(stop - n, f.group_n) * scales, f.scale, wide_,
                   part == 0 ? factor().gate : factor().up,
                   static_cast<char*>(ranks_[rank].w13_scale) + row / group * scale_bytes);
      }
      n = stop;
    }
  }

  // Rows of down: a rank has its intermediate columns of each.
  void put_down(const Slice& slice, const ktk_matrix& matrix, const Stored& rows, size_t begin,
                size_t end) const {
    const ktk_format& f = matrix.format;
    const Block block = block_of(f.element);
    const size_t row_bytes = block.bytes_of(per_rank_);
    for (size_t k = 0; k < matrix.k;) {
      const size_t at = slice.begin + k, rank = at / per_rank_;
      const size_t stop = std::min(matrix.k, (rank + 1) * per_rank_ - slice.begin);
      char* to = static_cast<char*>(ranks_[rank].w2) + block.bytes_of(at % per_rank_);
      for (size_t n = begin; n < end; ++n) {
        std::memcpy(to + n * row_bytes,
                    rows.data.data() + (n - begin) * rows.shape.data_bytes + block.bytes_of(k),
                    block.bytes_of(stop - k));
      }
      if (f.scale != KTK_NONE && f.group_k && at % f.group_k == 0)
        put_down_scales(f, rows, rank, begin, at, k, stop);
      k = stop;
    }
    // A scale for the whole row is everybody's, and each slice has it.
    if (f.scale == KTK_NONE || f.group_k || slice.begin) return;
    const size_t group = std::max<uint32_t>(f.group_n, 1);
    for (const RankTarget& rank : ranks_) {
      put_scales(rows.scale.data(), rows.shape.groups_n, f.scale, wide_, factor().down,
                 static_cast<char*>(rank.w2_scale) + begin / group * scale_size(f));
    }
  }

  // Scales of columns [k, stop) of a slice, the first of which is column `at` of the matrix and the
  // first of a group.
  void put_down_scales(const ktk_format& f, const Stored& rows, size_t rank, size_t begin,
                       size_t at, size_t k, size_t stop) const {
    const size_t group = std::max<uint32_t>(f.group_n, 1);
    const size_t row_bytes = per_rank_ / f.group_k * scale_size(f);
    char* to =
        static_cast<char*>(ranks_[rank].w2_scale) + at % per_rank_ / f.group_k * scale_size(f);
    const char* from = rows.scale.data() + k / f.group_k * element_bits(f.scale) / 8;
    for (size_t g = 0; g < rows.shape.groups_n; ++g) {
      put_scales(from + g * rows.shape.scale_bytes, groups_of(stop - k, f.group_k), f.scale, wide_,
                 factor().down, to + (begin / group + g) * row_bytes);
    }
  }

  const Layer& layer_;
  const Weights& weights_;
  size_t expert_;
  const std::vector<RankTarget>& ranks_;
  bool wide_;
  size_t per_rank_;
};

void check_groups(const char* name, size_t step, const std::string& format, size_t per_rank) {
  if (per_rank % step == 0) return;
  throw std::invalid_argument("each GPU gets " + std::to_string(per_rank) +
                              " intermediate columns, but " + name + " is stored as " + format +
                              ", which can be cut at multiples of " + std::to_string(step) +
                              " only");
}

}  // namespace

void check_write(const Layer& layer, size_t expert, const std::vector<RankTarget>& ranks,
                 bool wide_scales) {
  if (!layer.variant().export_weight) {
    throw std::invalid_argument("the backend " + layer.table().name +
                                " cannot write weights as a checkpoint has them");
  }
  if (!layer.config().gated) {
    throw std::invalid_argument("GPUs take rows of gate and of up, and these experts have no gate");
  }
  const Layer::Loaded weights = layer.weights();
  if (!weights || weights->state(expert) != Weights::State::kLoaded) {
    throw std::invalid_argument("expert " + std::to_string(expert) + " is not loaded");
  }
  if (weights->scales_differ(expert)) {
    throw std::invalid_argument(
        "expert " + std::to_string(expert) + " was quantised in " +
        std::to_string(weights->shards().size()) +
        " shards, where columns that share a scale in a checkpoint have several: load the layer "
        "with shards=1 to write it");
  }
  // Columns of down and rows of gate and up go together, whatever their order.
  if (weights->order(expert).gate || weights->order(expert).up) {
    throw std::invalid_argument("expert " + std::to_string(expert) +
                                " wants columns of its input in an order of its own (desc_act), "
                                "which kernels of GPUs are not told");
  }
  const size_t intermediate = layer.config().intermediate;
  if (ranks.empty() || intermediate % ranks.size()) {
    throw std::invalid_argument("intermediate_size " + std::to_string(intermediate) +
                                " cannot be divided among " + std::to_string(ranks.size()) +
                                " GPUs");
  }
  const size_t per_rank = intermediate / ranks.size();
  const Parts<ktk_format>& formats = weights->formats();
  for (const ktk_format& f : {formats.gate, formats.up, formats.down}) {
    if (f.scale == KTK_NONE || f.group_n) continue;
    throw std::invalid_argument("weights are stored as " + describe(f) +
                                ", but GPUs take scales of some rows each, not of all");
  }
  const Parts<float>& factor = weights->factor(expert);
  const auto has_factor = [&](float value, const ktk_format& f) {
    return value != 1 && !is_folded(f.scale, wide_scales);
  };
  if (has_factor(factor.gate, formats.gate) || has_factor(factor.up, formats.up) ||
      has_factor(factor.down, formats.down)) {
    throw std::invalid_argument("expert " + std::to_string(expert) +
                                " has a factor beside the scales of a matrix, for which GPUs have "
                                "no place");
  }
  const auto rows = [&](const char* name, const ktk_format& f) {
    if (f.scale != KTK_NONE) {
      check_groups(name, std::max<uint32_t>(f.group_n, 1), describe(f), per_rank);
    }
  };
  rows("gate", formats.gate);
  rows("up", formats.up);
  const ktk_format& down = formats.down;
  check_groups("down", block_of(down.element).columns, describe(down), per_rank);
  if (down.scale != KTK_NONE && down.group_k) {
    check_groups("down", down.group_k, describe(down), per_rank);
  }
}

void write_expert(Layer& layer, size_t expert, const std::vector<RankTarget>& ranks,
                  bool wide_scales) {
  // Nothing is loaded meanwhile, and who asks what is there need not wait.
  const auto turn = layer.engine()->turn();
  // What was there when the write was queued may be unloaded since, or of another format.
  check_write(layer, expert, ranks, wide_scales);
  const Weights& weights = *layer.weights();
  Writer(layer, weights, expert, ranks, wide_scales).run();
}

}  // namespace ktk
