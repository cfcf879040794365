// The packed weight of a dense layer, divided into shards.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "core/memory.h"
#include "moe/order.h"
#include "moe/table.h"

namespace ktk {

class WorkerPool;

// Rows of the weight as they are given, what their product is multiplied with before the bias is
// added, and what they are to be stored as: the backend's choice where that is left open. The bias
// has n floats, or is NULL.
struct DensePart {
  size_t n = 0;
  ktk_source source{};
  Order order{};  // of its columns, which are given in it
  float factor = 1;
  const float* bias = nullptr;
  std::optional<ktk_format> stored{};
};

// A way of encoding rows of x: as a matrix wants it, whose columns are in an order.
struct DenseAct {
  ktk_matrix matrix;
  Order order;
};

// Columns [begin, end) of the output: rows of one part, as a matrix of its own.
struct DenseSlice {
  size_t part = 0;
  size_t begin = 0, end = 0;
  size_t act = 0;  // of DenseWeights::acts, that it is multiplied with
  ktk_matrix matrix{};
  size_t bytes = 0;
  float factor = 1;
  const char* packed = nullptr;
};

// What one NUMA node has of every part: a range of its rows.
//
//   | part 0 | part 1 | part 2 |
//
// There are several slices of a part where a shard begins inside a group of rows that share a
// scale, because no matrix can begin there.
struct DenseShard {
  std::vector<DenseSlice> slices;  // by column
  Memory memory;
};

class DenseWeights {
 public:
  // Packs parts of k columns, whose stored formats have been matched with the backend's, one behind
  // the other, with all workers of the pool; the sources may go afterwards. Shard s lives on
  // nodes[s].
  DenseWeights(const Variant& variant, std::span<const DensePart> parts, size_t k,
               const std::vector<int>& nodes, WorkerPool& pool);

  // How many shards some part can be divided into.
  static size_t most_shards(const Variant& variant, std::span<const DensePart> parts);

  // Writes the weight as it is stored, in f32: [n, k], row-major.
  void unpack(float* out) const;
  // Writes the rows of a part in its format, as ktk_variant::export_weight, which the variant has;
  // their columns are in the order that the part was given in.
  void write_part(size_t part, const ktk_export& target) const;
  // The slice that has a column of the output.
  const DenseSlice& slice_of(size_t column) const;

  size_t n() const { return n_; }
  size_t k() const { return k_; }
  const std::vector<DenseShard>& shards() const { return shards_; }
  // Of each part.
  const std::vector<ktk_format>& formats() const { return formats_; }
  // Each distinct way that activations are encoded.
  const std::vector<DenseAct>& acts() const { return acts_; }
  const Order& order_of(const DenseSlice& slice) const { return acts_[slice.act].order; }
  // Whether some part has its columns in an order.
  bool has_orders() const;
  // n floats, or NULL.
  const float* bias() const { return bias_.empty() ? nullptr : bias_.data(); }
  // Packed bytes.
  size_t bytes() const;

 private:
  void place(const Variant& variant, std::span<const DensePart> parts,
             const std::vector<int>& nodes);
  size_t act_of(const Variant& variant, const ktk_matrix& matrix, const Order& order);

  const Variant& variant_;
  size_t n_ = 0, k_;
  std::vector<DenseShard> shards_;
  std::vector<const DenseSlice*> by_column_;
  std::vector<ktk_format> formats_;
  std::vector<DenseAct> acts_;
  std::vector<float> bias_;
};

}  // namespace ktk
