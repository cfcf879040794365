// The packed experts of one layer, divided into shards.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/memory.h"
#include "moe/carver.h"
#include "moe/config.h"
#include "moe/cuts.h"
#include "moe/order.h"
#include "moe/table.h"
#include "moe/unread.h"

namespace ktk {

struct PackJob;
class WorkerPool;

// A value for each projection of an expert: gate [I, H], up [I, H] and down [H, I]. Without a gate,
// its matrix has no rows and is stored as up is.
template <typename T>
struct Parts {
  T gate{}, up{}, down{};
};

// The matrices of one expert as they are given, and what each product is multiplied with before the
// bias is added. Biases are f32 and may be NULL. Rows of gate and up, and their biases, are given
// in the order of down's columns. `unread` are bytes of the matrices that are still in files.
struct ExpertSource : Parts<ktk_source> {
  Parts<float> factor{1, 1, 1};
  Parts<Order> order{};
  const float *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
  std::span<const Unread> unread{};
};

// One part of every expert: rows [begin, end) of gate and up, the same columns of down, as matrices
// of their own.
//
//   expert 0                      expert 1
//   | gate | up | down | padding  | gate | up | down | padding ...
//
// Each expert starts on a page, so that experts that are left out take no memory. One that takes
// more bytes than others, because of what is in it, has memory of its own.
struct Slice {
  // Where the matrices of an expert lie in its memory.
  struct Place {
    Parts<size_t> bytes, at;
    Carver pieces;

    Place() = default;
    explicit Place(const Parts<size_t>& bytes);
  };
  struct Own {
    Memory memory;
    Place place;
  };

  size_t begin = 0, end = 0;
  Parts<ktk_matrix> matrix;
  Place place;
  size_t expert_bytes = 0;
  Memory memory;
  int node = -1;
  std::vector<Own> own;  // of each expert, once there is one

  size_t width() const { return end - begin; }
  const Own* own_of(size_t expert) const {
    return own.empty() || !own[expert].memory ? nullptr : &own[expert];
  }
  const Place& place_of(size_t expert) const {
    const Own* found = own_of(expert);
    return found ? found->place : place;
  }
  char* memory_of(size_t expert) const {
    const Own* found = own_of(expert);
    return found ? found->memory.data() : memory.data() + expert * expert_bytes;
  }
  char* gate_at(size_t expert) const { return memory_of(expert) + place_of(expert).at.gate; }
  char* up_at(size_t expert) const { return memory_of(expert) + place_of(expert).at.up; }
  char* down_at(size_t expert) const { return memory_of(expert) + place_of(expert).at.down; }

  // Gives an expert room for so many bytes, and back what it does not need.
  void make_room(size_t expert, const Parts<size_t>& needed);
  // Forgets it.
  void discard(size_t expert);
  // The experts that lie in the huge pages of an expert, [first, last): its own among them.
  struct Range {
    size_t first, last;
  };
  Range neighbours(size_t expert) const;
};

// What one NUMA node has of every expert: slices [first, last). There are several where a shard
// begins inside a group of columns that share a scale, because no matrix can begin there.
struct Shard {
  size_t first, last;
};

// What the intermediate size may be cut at, for what is stored and what is given.
CutRules cut_rules(const ktk_tile& tile, const Parts<ktk_format>& stored,
                   const ExpertSource& given);

class Weights {
 public:
  // Of an expert. Missing: never loaded. Left out: rows routed to it contribute nothing. Unloaded:
  // nothing may be routed to it. The last two have no memory.
  enum class State : uint8_t { kMissing, kLoaded, kLeftOut, kUnloaded };

  // Splits the intermediate size into shards of about the same width, as cut_rules() has it for
  // the first expert's source; shard s lives on nodes[s]. Throws std::invalid_argument when there
  // are more of them than it can be cut into.
  Weights(const Config& config, const Variant& variant, const Parts<ktk_format>& formats,
          const ExpertSource& first, const std::vector<int>& nodes);

  // Packs one expert with all workers of the pool; the sources may go afterwards. The formats have
  // been matched with the backend's by the caller. Throws std::invalid_argument where a group of
  // the source reaches over a cut that is no cut of the first source's groups: nothing has changed
  // then. Where memory runs out, or packing throws, the expert is unloaded, or left out as before.
  void load(size_t expert, const ExpertSource& source, WorkerPool& pool);
  // Forgets an expert and gives its memory back. `state`: left out or unloaded.
  void discard(size_t expert, State state);

  // Writes a matrix of an expert as stored, in f32: [I, H], [I, H] and [H, I], row-major, with rows
  // and columns where they were before anybody sorted them.
  void unpack(size_t expert, float* gate, float* up, float* down) const;

  const std::vector<Slice>& slices() const { return slices_; }
  const std::vector<Shard>& shards() const { return shards_; }
  const Parts<ktk_format>& formats() const { return formats_; }
  State state(size_t expert) const { return states_[expert]; }
  // Whether a scale of what is stored belongs to columns of several slices, each of which has
  // chosen one of its own: weights that were quantised while they were packed.
  bool scales_differ(size_t expert) const { return scales_differ_[expert] != 0; }
  // Packed bytes of one expert that takes no memory of its own, padding between experts not
  // counted.
  size_t expert_bytes() const;
  // Packed bytes of all loaded experts.
  size_t bytes() const;

  const Parts<float>& factor(size_t expert) const { return factors_[expert]; }

  // In which order an expert's matrices have their columns. Rows of gate and up are in that of
  // down's columns, which nobody sees but who looks at them: products of gate and up are what down
  // multiplies.
  const Parts<Order>& order(size_t expert) const { return orders_[expert]; }
  bool has_orders() const { return has_orders_; }
  // Whether gate and up of some expert want x in two orders, and whether experts want it in
  // several.
  bool gate_up_orders_differ() const { return gate_up_orders_differ_; }
  bool expert_orders_differ() const { return expert_orders_differ_; }
  const float* gate_bias(size_t expert) const {
    return bias(gate_bias_, expert, config_.intermediate);
  }
  const float* up_bias(size_t expert) const { return bias(up_bias_, expert, config_.intermediate); }
  const float* down_bias(size_t expert) const { return bias(down_bias_, expert, config_.hidden); }

 private:
  static const float* bias(const std::vector<float>& all, size_t expert, size_t n) {
    return all.empty() ? nullptr : all.data() + expert * n;
  }
  void add_slice(size_t begin, size_t end, int node);
  bool chooses_scales(const ExpertSource& source) const;
  Order shared(const Order& order) const;
  void fill(size_t expert, const ExpertSource& source, std::span<PackJob> jobs,
            std::span<const Unread> unread, WorkerPool& pool);
  void compare_orders();
  void set_bias(std::vector<float>& all, const float* bias, size_t expert, size_t n);
  void keep_gaps(size_t expert);

  Config config_;
  const Variant& variant_;
  Parts<ktk_format> formats_;
  std::vector<Slice> slices_;
  std::vector<Shard> shards_;
  std::vector<State> states_;
  bool gaps_ = false;  // experts were left out or unloaded
  std::vector<uint8_t> scales_differ_;
  std::vector<Parts<float>> factors_;
  std::vector<Parts<Order>> orders_;
  bool has_orders_ = false, gate_up_orders_differ_ = false, expert_orders_differ_ = false;
  std::vector<float> gate_bias_, up_bias_, down_bias_;  // empty until one is given
};

}  // namespace ktk
