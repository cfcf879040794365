// Weight codec: floats that are quantised group by group, or codes that are stored as they are.
#pragma once

#include "amxint4/search.h"
#include "codec/int4/variant.h"

namespace ktk::amxint4 {
namespace {

// Values of a row, `count` at a time, as f32.
template <class Element>
struct Floats {
  const ktk_source* source;

  void read(size_t n, size_t k, size_t count, float* out) const {
    using Storage = typename Element::Storage;
    const char* row = static_cast<const char*>(source->data) + n * source->data_stride;
    const Storage* from = reinterpret_cast<const Storage*>(row) + k;
    size_t i = 0;
    for (; i + 16 <= count; i += 16) store_f32(out + i, Element::load(from + i));
    if (i < count) {
      float some[16];
      store_f32(some, load_some<Element>(from + i, count - i));
      for (size_t j = 0; i + j < count; ++j) out[i + j] = some[j];
    }
  }
};

inline float f32_from_e4m3(uint8_t code) {
  const uint32_t size = code & 0x7f;
  const float normal = __builtin_bit_cast(float, (size << 20) + (120u << 23));
  const float subnormal = static_cast<float>(static_cast<int32_t>(size)) * 0x1p-9f;
  const float value = size < 8 ? subnormal : size == 0x7f ? __builtin_nanf("") : normal;
  return code & 0x80 ? -value : value;
}

// E4M3 with an f32 scale per block.
struct ScaledE4m3 {
  const ktk_source* source;

  void read(size_t n, size_t k, size_t count, float* out) const {
    const ktk_format& format = source->format;
    const uint8_t* row = static_cast<const uint8_t*>(source->data) + n * source->data_stride + k;
    const size_t scale_row = format.group_n ? n / format.group_n : 0;
    const char* scales = static_cast<const char*>(source->scale) + scale_row * source->scale_stride;
    for (size_t i = 0; i < count;) {
      const size_t group = format.group_k ? (k + i) / format.group_k : 0;
      const size_t end = format.group_k ? smaller((group + 1) * format.group_k - k, count) : count;
      const float scale = reinterpret_cast<const float*>(scales)[group];
      for (; i < end; ++i) out[i] = f32_from_e4m3(row[i]) * scale;
    }
  }
};

// Rows for int4::pack_rows(): a group is read once to find its range, once to search its scale, and
// once more, 32 values at a time, for its codes.
template <class Values>
struct QuantizedRows {
  static constexpr size_t kChunk = 128;
  const ktk_matrix* matrix;
  Values values;

  template <class Visit>
  void visit(size_t n, size_t begin, size_t end, const Visit& visit) const {
    float x[kChunk];
    for (size_t k = begin; k < end; k += kChunk) {
      const size_t count = smaller(kChunk, end - k);
      values.read(n, k, count, x);
      visit(x, count);
    }
  }

  Group group(size_t n, size_t g) const {
    const size_t begin = g * int4::group_depth(matrix);
    const size_t end = smaller(begin + int4::group_depth(matrix), matrix->k);
    Range range;
    visit(n, begin, end, [&](const float* x, size_t count) { range.add(x, count); });
    if (!range.is_finite()) return {0x7fc0, bf16_from_f32(int4::kFixedZero)};
    if (range.size_bits == 0) return {0, bf16_from_f32(int4::kFixedZero)};
    Search search(matrix->format, range);
    visit(n, begin, end, [&](float* x, size_t count) { search.add(x, count); });
    return search.best();
  }

  void codes(size_t n, size_t k, size_t count, Group group, uint8_t* out) const {
    const float scale = f32_from_bf16(group.scale);
    if (!(scale < 0 || scale > 0)) return;  // zeros or NaN, whatever the codes
    float x[int4::kChunkDepth];
    values.read(n, k, count, x);
    for (size_t i = count; i < int4::kChunkDepth; ++i) x[i] = 0;
    const F32x16 zero =
        splat(int4::has_zeros(matrix) ? f32_from_bf16(group.zero) : int4::kFixedZero);
    for (size_t i = 0; i < int4::kChunkDepth; i += 16) {
      const F32x16 ratio = divide(load_f32(x + i), splat(scale));
      const __m128i codes = to_bytes(to_code(add(ratio, zero)));
      // Words of two codes, one a byte, to bytes: the even one in the low nibble.
      const __m128i pairs =
          _mm_and_si128(_mm_or_si128(codes, _mm_srli_epi16(codes, 4)), _mm_set1_epi16(0xff));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i / 2), _mm_packus_epi16(pairs, pairs));
    }
  }
};

template <class Values>
inline void pack_floats(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  int4::pack_rows(matrix, QuantizedRows<Values>{matrix, {source}}, n_begin, n_end, packed);
}

inline void pack_weight(const ktk_matrix* matrix, const ktk_source* source, size_t n_begin,
                        size_t n_end, void* packed) {
  switch (source->format.element) {
    case KTK_F32:
      return pack_floats<Floats<ElementF32>>(matrix, source, n_begin, n_end, packed);
    case KTK_F16:
      return pack_floats<Floats<ElementF16>>(matrix, source, n_begin, n_end, packed);
    case KTK_BF16:
      return pack_floats<Floats<ElementBf16>>(matrix, source, n_begin, n_end, packed);
    case KTK_E4M3:
      return pack_floats<ScaledE4m3>(matrix, source, n_begin, n_end, packed);
    default:
      return int4::pack_ready(matrix, source, n_begin, n_end, packed);
  }
}

struct WeightCodec : int4::WeightCodec {
  static constexpr auto pack = pack_weight;
};

}  // namespace
}  // namespace ktk::amxint4
