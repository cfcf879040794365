// Rows of a weight matrix as they are given, on their way into a layout of int8 with a scale per
// row: codes of kDepth columns at a time, zero behind the end of the row.
#pragma once

#include "codec/int8/quantize.h"
#include "gemm/prefetch.h"
#include "ktk/abi.h"

namespace ktk {
namespace {

// Reads rows of floats: scale = absmax / 127 of the row, code = x / scale to nearest even. A row
// with NaN or Inf has the scale NaN and codes 0.
template <class Element, size_t kColumns, size_t kDepth>
struct FloatRows {
  using Storage = typename Element::Storage;
  const ktk_source* source;
  size_t k;
  SymmetricScale scales[kColumns];  // of the block of columns that is being packed

  FloatRows(const ktk_source* from, size_t depth) : source(from), k(depth) {}

  const Storage* row(size_t n) const {
    const char* data = static_cast<const char*>(source->data);
    return reinterpret_cast<const Storage*>(data + n * source->data_stride);
  }
  float scale(size_t n) {
    scales[n % kColumns] = symmetric_scale(Element::absmax(row(n), k));
    return scales[n % kColumns].scale;
  }
  // Fetches what codes() of the same arguments reads.
  void prefetch(size_t n, size_t k_begin) const {
    const char* from = reinterpret_cast<const char*>(row(n) + k_begin);
    for (size_t i = 0; i < kDepth * sizeof(Storage); i += 64) prefetch_l2(from + i);
  }
  void codes(size_t n, size_t k_begin, uint8_t* out) const {
    const SymmetricScale s = scales[n % kColumns];
    const Storage* from = row(n) + k_begin;
    if (k_begin + kDepth <= k) {
      for (size_t i = 0; i < kDepth; i += 16) {
        store_bytes(out + i, narrow(quantize(Element::load(from + i), s)));
      }
      return;
    }
    for (size_t i = 0; i < kDepth; i += 16) {
      const size_t left = k_begin + i < k ? k - k_begin - i : 0;
      const F32x16 x = load_some<Element>(left ? from + i : from, left);
      store_bytes(out + i, narrow(quantize(x, s)));
    }
  }
};

// Copies rows that are int8 with a scale each already.
template <size_t kDepth>
struct ReadyRows {
  const ktk_source* source;
  size_t k;

  ReadyRows(const ktk_source* from, size_t depth) : source(from), k(depth) {}

  float scale(size_t n) const {
    const char* scale = static_cast<const char*>(source->scale);
    return *reinterpret_cast<const float*>(scale + n * source->scale_stride);
  }
  void prefetch(size_t n, size_t k_begin) const {
    const char* data = static_cast<const char*>(source->data);
    prefetch_l2(data + n * source->data_stride + k_begin);
  }
  void codes(size_t n, size_t k_begin, uint8_t* out) const {
    const uint8_t* from =
        static_cast<const uint8_t*>(source->data) + n * source->data_stride + k_begin;
    const size_t count = k - k_begin < kDepth ? k - k_begin : kDepth;
    if (count == kDepth) {
      for (size_t i = 0; i < kDepth; i += 16) {
        store_bytes(out + i, load_bytes(from + i));
      }
      return;
    }
    for (size_t i = 0; i < kDepth; ++i) out[i] = i < count ? from[i] : 0;
  }
};

// Calls pack(rows) with what reads the source, for packing kColumns columns at a time.
template <size_t kColumns, size_t kDepth, class Pack>
inline void with_rows(const ktk_matrix* matrix, const ktk_source* source, Pack pack) {
  switch (source->format.element) {
    case KTK_F32:
      return pack(FloatRows<ElementF32, kColumns, kDepth>(source, matrix->k));
    case KTK_F16:
      return pack(FloatRows<ElementF16, kColumns, kDepth>(source, matrix->k));
    case KTK_BF16:
      return pack(FloatRows<ElementBf16, kColumns, kDepth>(source, matrix->k));
    default:
      return pack(ReadyRows<kDepth>(source, matrix->k));
  }
}

}  // namespace
}  // namespace ktk
