// Row-major bf16, f16 or f32 weights <-> the packed layout.
#pragma once

#include "bf16z/decode.h"
#include "bf16z/encode.h"

namespace ktk::bf16z {
namespace {

// A step that n or k ends in: through a copy that is padded.
template <ktk_element kElement>
inline void pack_edge(const BlockSource<kElement>& source, size_t k, uint16_t padding, char* step) {
  alignas(64) uint16_t padded[kNr][kStepDepth];
  for (size_t row = 0; row < kNr; ++row) {
    const char* from = source.rows + row * source.stride + k * source.kBytes;
    for (size_t i = 0; i < kStepDepth; ++i, from += source.kBytes) {
      const bool is_given = row < source.num_rows && k + i < source.depth;
      padded[row][i] = is_given ? bf16::element_as_bf16<kElement>(from) : padding;
    }
  }
  bf16::pack_step<KTK_BF16>(reinterpret_cast<const char*>(padded), sizeof padded[0], step);
}

template <ktk_element kElement>
inline void pack_block(const BlockSource<kElement>& source, const BlockParts<char>& block) {
  const Table table = choose_table(source);
  memset(block.header, 0, header_bytes(block.steps));
  memset(block.side, 0, side_bytes(block.steps));
  memcpy(block.header, table.exponents, sizeof table.exponents);
  const Encoder encoder(table);
  uint32_t* const side = reinterpret_cast<uint32_t*>(block.side);
  PatchWriter patches = {side, side + side_bytes(block.steps) / sizeof *side};
  for (size_t i = 0; i < block.steps; ++i) {
    alignas(64) char plain[kPlainStepBytes];
    const size_t k = i * kStepDepth;
    if (source.num_rows == kNr && source.depth - k >= kStepDepth) {
      bf16::pack_step<kElement>(source.rows + k * source.kBytes, source.stride, plain);
    } else {
      pack_edge(source, k, table.padding, plain);
    }
    const uint32_t* const first = patches.at;
    for (size_t group = 0; group < kGroups; ++group) {
      encoder.group(plain, group, block.step(i) + group * kGroupBytes, patches);
    }
    patches_of_steps(block.header)[i] = static_cast<uint16_t>(patches.at - first);
  }
  reinterpret_cast<Header*>(block.header)->patches = static_cast<uint32_t>(patches.at - side);
}

// Calls body(source of a block, number of the block) for the blocks of [n_begin, n_end).
template <ktk_element kElement, class Body>
inline void for_blocks(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                       size_t n_end, const Body& body) {
  for (size_t n = n_begin; n < n_end; n += kNr) {
    body(BlockSource<kElement>(matrix, source, n, n_end), n / kNr);
  }
}

// The same for what is given.
template <class Body>
inline void for_blocks(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                       size_t n_end, const Body& body) {
  switch (source->format.element) {
    case KTK_BF16:
      return for_blocks<KTK_BF16>(matrix, source, n_begin, n_end, body);
    case KTK_F16:
      return for_blocks<KTK_F16>(matrix, source, n_begin, n_end, body);
    case KTK_F32:
      return for_blocks<KTK_F32>(matrix, source, n_begin, n_end, body);
  }
}

inline size_t source_size(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                          size_t n_end) {
  const size_t room = side_bytes(num_steps(matrix)) / sizeof(uint32_t);
  bool fits = true;
  for_blocks(matrix, source, n_begin, n_end,
             [&](const auto& block, size_t) { fits = fits && most_patches(block, room) <= room; });
  return fits ? weight_size(matrix) : plain_size(matrix);
}

inline void pack_sized(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                       size_t n_end, void* packed, size_t bytes) {
  char* const out = static_cast<char*>(packed);
  if (bytes == weight_size(matrix)) {
    for_blocks(matrix, source, n_begin, n_end, [&](const auto& block, size_t index) {
      pack_block(block, BlockParts<char>(matrix, out, index));
    });
    return;
  }
  if (n_begin == 0) {
    memset(out, 0, kLine);
    reinterpret_cast<Header*>(out)->form = kPlain;
  }
  bf16::pack_weight(matrix, source, n_begin, n_end, out + kLine);
}

// Whether the patches of a block are as many as there is room for, and those of each step are in it
// and in the order of groups.
inline bool is_block(const BlockParts<const char>& block) {
  const uint16_t* const counts = patches_of_steps(block.header);
  const uint32_t* patch = reinterpret_cast<const uint32_t*>(block.side);
  size_t count = 0;
  for (size_t i = 0; i < block.steps; ++i) count += counts[i];
  if (count != reinterpret_cast<const Header*>(block.header)->patches) return false;
  if (count > side_bytes(block.steps) / sizeof *patch) return false;
  for (size_t i = 0; i < block.steps; ++i) {
    size_t group = 0;
    for (const uint32_t* const end = patch + counts[i]; patch != end; ++patch) {
      if (*patch >> 16 >= kNr * kStepDepth || group_of(*patch) < group) return false;
      group = group_of(*patch);
    }
  }
  return true;
}

inline int is_packed(const ktk_matrix* matrix, const void* packed, size_t bytes) {
  if (bytes < kLine) return 0;
  if (form_of(packed) == kPlain) return bytes == plain_size(matrix);
  if (form_of(packed) != kTwelveBits || bytes != weight_size(matrix)) return 0;
  for (size_t i = 0; i < num_blocks(matrix); ++i) {
    if (!is_block({matrix, static_cast<const char*>(packed), i})) return 0;
  }
  return 1;
}

// Calls body(columns of a block in [n_begin, n_end), first of them, plain step, k, depth) for each
// step of the blocks.
template <class Decoder, class Body>
inline void for_steps(const ktk_matrix* matrix, const void* packed, size_t n_begin, size_t n_end,
                      const Body& body) {
  for (size_t n = n_begin; n < n_end;) {
    const size_t first = n % kNr, count = smaller(n_end - n, kNr - first);
    const BlockParts<const char> block(matrix, static_cast<const char*>(packed), n / kNr);
    BlockReader<Decoder> reader(block);
    for (size_t k = 0; k < matrix->k; k += kStepDepth) {
      alignas(64) char plain[kPlainStepBytes];
      reader.read_step(plain);
      body(n, first, count, plain, k, smaller(matrix->k - k, kStepDepth));
    }
    n += count;
  }
}

template <class Decoder>
inline void unpack_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, float* out, size_t out_stride) {
  if (form_of(packed) == kPlain) {
    return bf16::unpack_weight(matrix, plain_weight(packed), n_begin, n_end, out, out_stride);
  }
  for_steps<Decoder>(
      matrix, packed, n_begin, n_end,
      [&](size_t n, size_t first, size_t count, const char* plain, size_t k, size_t depth) {
        const ktk_matrix step = {kNr, depth, matrix->format};
        bf16::unpack_block(&step, plain, first, first + count, out + (n - n_begin) * out_stride + k,
                           out_stride);
      });
}

template <class Decoder>
inline void export_weight(const ktk_matrix* matrix, const void* packed, size_t n_begin,
                          size_t n_end, const ktk_export* target) {
  if (form_of(packed) == kPlain) {
    return bf16::export_weight(matrix, plain_weight(packed), n_begin, n_end, target);
  }
  for_steps<Decoder>(
      matrix, packed, n_begin, n_end,
      [&](size_t n, size_t, size_t count, const char* plain, size_t k, size_t depth) {
        const ktk_matrix step = {kNr, depth, matrix->format};
        ktk_export rows = *target;
        rows.data = static_cast<char*>(target->data) + n * target->data_stride + k * 2;
        bf16::export_weight(&step, plain, 0, count, &rows);
      });
}

template <class Decoder>
struct WeightCodec {
  static constexpr auto kLayout = bf16z::kLayout;
  static constexpr uint32_t kNStep = kNr;
  static constexpr auto size = weight_size;
  static constexpr auto source_size = bf16z::source_size;
  static constexpr auto pack_sized = bf16z::pack_sized;
  static constexpr auto is_packed = bf16z::is_packed;
  static constexpr auto unpack = unpack_weight<Decoder>;
  static constexpr auto offset = weight_offset;
  static constexpr auto write = export_weight<Decoder>;
};

}  // namespace
}  // namespace ktk::bf16z
