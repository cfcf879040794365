#include "moe/divide.h"

#include <algorithm>
#include <utility>

namespace ktk {
namespace {

// Rows that are copied for nothing cost less than picking out all others.
constexpr bool nearly_all(size_t rows, size_t tokens) { return rows * 16 >= tokens * 15; }

// In the place of a rank: none, as of no expert; to be chosen, as of an expert with copies; that of
// another expert of the token, as of a zero expert.
constexpr int kNobody = -1, kUndecided = -2, kAnyOther = -3;

// The ranks of experts, those with copies in a second pass.
class Choice {
 public:
  Choice(const Holders& holders, int home)
      : holders_(holders), home_(home), only_(holders.experts), used_(holders.ranks) {
    for (size_t e = 0; e < holders.experts; ++e) {
      int& rank = only_[e] = kNobody;
      for (size_t r = 0; r < holders.ranks; ++r) {
        if (!holders.holds(r, static_cast<int32_t>(e))) continue;
        rank = rank == kNobody ? static_cast<int>(r) : kUndecided;
      }
    }
  }

  // Writes the rank of each of a token's experts.
  void choose(const int32_t* ids, size_t k, int* rank) {
    for (size_t& used : used_) used = 0;
    bool undecided = false, passed = false;
    for (size_t j = 0; j < k; ++j) {
      rank[j] = of(ids[j]);
      if (rank[j] >= 0) ++used_[static_cast<size_t>(rank[j])];
      undecided |= rank[j] == kUndecided;
      passed |= rank[j] == kAnyOther;
    }
    for (size_t j = 0; undecided && j < k; ++j) {
      if (rank[j] != kUndecided) continue;
      rank[j] = least_used(ids[j]);
      ++used_[static_cast<size_t>(rank[j])];
    }
    if (!passed) return;
    size_t lowest = 0;
    while (lowest < used_.size() && used_[lowest] == 0) ++lowest;
    const int any = lowest < used_.size() ? static_cast<int>(lowest) : std::max(home_, 0);
    for (size_t j = 0; j < k; ++j) {
      if (rank[j] == kAnyOther) rank[j] = any;
    }
  }

 private:
  int of(int32_t id) const {
    if (id < 0) return kNobody;
    return static_cast<size_t>(id) < only_.size() ? only_[static_cast<size_t>(id)] : kAnyOther;
  }

  int least_used(int32_t expert) const {
    int best = kNobody;
    size_t fewest = 0;
    for (size_t r = 0; r < holders_.ranks; ++r) {
      if (!holders_.holds(r, expert)) continue;
      const bool here = static_cast<int>(r) == home_;
      if (best == kNobody || used_[r] < fewest || (used_[r] == fewest && here)) {
        best = static_cast<int>(r);
        fewest = used_[r];
      }
    }
    return best;
  }

  const Holders& holders_;
  const int home_;
  std::vector<int> only_;
  std::vector<size_t> used_;  // experts of the token on each rank
};

}  // namespace

std::vector<RankPart> divide_tokens(const int32_t* ids, size_t tokens, size_t k,
                                    const Holders& holders, int home) {
  Choice choice(holders, home);
  std::vector<int> rank(tokens * k);
  std::vector<size_t> rows(holders.ranks, 0), last(holders.ranks, tokens);
  for (size_t t = 0; t < tokens; ++t) {
    choice.choose(ids + t * k, k, &rank[t * k]);
    for (size_t j = 0; j < k; ++j) {
      if (rank[t * k + j] < 0) continue;
      const auto r = static_cast<size_t>(rank[t * k + j]);
      if (last[r] == t) continue;
      last[r] = t;
      ++rows[r];
    }
  }
  std::vector<RankPart> parts;
  for (size_t r = 0; r < holders.ranks; ++r) {
    if (rows[r] == 0) continue;
    RankPart part;
    part.rank = r;
    part.all = nearly_all(rows[r], tokens);
    part.ids.reserve((part.all ? tokens : rows[r]) * k);
    for (size_t t = 0; t < tokens; ++t) {
      bool some = part.all;
      for (size_t j = 0; j < k && !some; ++j) some = rank[t * k + j] == static_cast<int>(r);
      if (!some) continue;
      if (!part.all) part.rows.push_back(static_cast<int64_t>(t));
      for (size_t j = 0; j < k; ++j) {
        part.ids.push_back(rank[t * k + j] == static_cast<int>(r) ? ids[t * k + j] : -1);
      }
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

}  // namespace ktk
