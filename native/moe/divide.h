// Divides the tokens of a call over ranks, each of which holds some of the experts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ktk {

// Which rank holds which expert: bytes [experts, ranks], not 0 where one does.
struct Holders {
  const uint8_t* held;
  size_t experts, ranks;

  bool holds(size_t rank, int32_t expert) const {
    return held[static_cast<size_t>(expert) * ranks + rank] != 0;
  }
};

// The tokens that have an expert on a rank.
struct RankPart {
  size_t rank = 0;
  bool all = false;           // all tokens, also the few without an expert there
  std::vector<int64_t> rows;  // which tokens, ascending; empty for all
  std::vector<int32_t> ids;   // [rows, k], -1 in place of other ranks' experts
};

// Of an expert's copies, that one computes a token whose rank has the fewest experts of the token;
// among equals `home`, the rank that the token is on (-1: all are), then the lowest. So the choice
// depends on nothing but the token's own experts and its rank. Ids are [tokens, k], from -1, which
// is no expert; those from `experts` on are zero experts, which all ranks have. The lowest of the
// ranks that compute an expert of the token adds them, so that the token goes nowhere for them;
// where it has no expert, `home`, or the first rank if all have the token. Ranks without tokens are
// left out.
std::vector<RankPart> divide_tokens(const int32_t* ids, size_t tokens, size_t k,
                                    const Holders& holders, int home);

}  // namespace ktk
