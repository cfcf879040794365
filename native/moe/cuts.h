// Where the intermediate size of a layer is cut.
#pragma once

#include <cstddef>
#include <vector>

namespace ktk {

// What cuts have to respect, and what they had better respect.
struct CutRules {
  size_t block = 1;            // columns of a whole block; no cut is inside one
  size_t step = 1;             // whole steps of micro-kernels: preferred
  std::vector<size_t> groups;  // columns that share a scale: preferred, and see cut_slices
};

// Columns that a cut is a multiple of at least, and a shard therefore has.
size_t least_step(const CutRules& rules);

// How many shards `extent` columns can be divided into.
size_t most_shards(size_t extent, const CutRules& rules);

// [0, ..., extent]: `shards` parts, no more of them than most_shards, the widest as narrow as
// whole least steps allow. Coarser steps are taken where that makes no part wider, and none more
// than 64 columns wider than another.
std::vector<size_t> cut_shards(size_t extent, size_t shards, const CutRules& rules);

// [begin, ..., end], cut further so that each slice starts where a group of every size starts, or
// lies within one. The groups of a slice that is a matrix of its own then have one scale each.
std::vector<size_t> cut_slices(size_t begin, size_t end, const std::vector<size_t>& groups);

}  // namespace ktk
