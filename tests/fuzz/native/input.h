// What fuzzers make of the bytes that libFuzzer hands them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/cpu.h"
#include "core/guarded.h"
#include "core/size.h"
#include "format/elements.h"
#include "format/format.h"
#include "moe/table.h"

// Of the backend whose module was compiled with module/ktk/module.h.
extern const ktk_backend kFuzzedBackend;

namespace fuzz {

// What must hold whatever the input is.
inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::abort();
}

// The bytes of one run, taken apart: numbers from the end and arrays from the front, so that a
// change of one leaves the other where it is. What lies beyond them is zeros.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  template <typename T>
  T any() {
    T value = 0;
    for (size_t i = 0; i < sizeof(T) && size_ > 0; ++i) {
      value = static_cast<T>(value << (sizeof(T) > 1 ? 8 : 0) | data_[--size_]);
    }
    return value;
  }
  // From `least` to `most`, of as few bytes as can say it.
  template <typename T>
  T in(T least, T most) {
    const uint64_t range = static_cast<uint64_t>(most) - static_cast<uint64_t>(least);
    uint64_t value = 0;
    for (uint64_t left = range; left > 0 && size_ > 0; left >>= 8)
      value = value << 8 | data_[--size_];
    if (range != UINT64_MAX) value %= range + 1;
    return static_cast<T>(static_cast<uint64_t>(least) + value);
  }
  bool flag() { return any<uint8_t>() & 1; }
  std::string bytes(size_t most) {
    const size_t count = std::min(most, size_);
    const std::string found(reinterpret_cast<const char*>(data_), count);
    data_ += count;
    size_ -= count;
    return found;
  }
  std::string text(size_t most) { return bytes(in<size_t>(0, most)); }

 private:
  const uint8_t* data_;
  size_t size_;
};

// Memory of exactly `bytes`, which nobody can go beyond: neither code that a sanitizer was compiled
// into, nor instructions that it does not know.
class Area {
 public:
  explicit Area(size_t bytes, size_t align = KTK_ALIGNMENT)
      : guarded_(bytes, align), size_(bytes) {}

  char* data() const { return guarded_.data(); }
  size_t size() const { return size_; }
  float* floats() const { return reinterpret_cast<float*>(data()); }
  void check(const char* who) const { guarded_.check(who); }

 private:
  ktk::Guarded guarded_;
  size_t size_;
};

// The input, over and over, so that a short one fills a large array.
inline void fill(char* to, size_t bytes, const std::string& from) {
  if (bytes == 0) return;  // there may be no array
  size_t there = std::min(from.size(), bytes);
  std::memcpy(to, from.data(), there);
  while (there < bytes) {  // twice as many each time: a whole number of copies is there
    const size_t more = std::min(there, bytes - there);
    std::memcpy(to + there, to, more);
    there += more;
  }
}

// A weight matrix of any bytes, in rows that may be further apart than they are long.
struct Weight {
  ktk_source source{};

  Weight(const ktk_format& format, size_t n, size_t k, Input& input) {
    source.format = format;
    const ktk::SourceShape shape = ktk::source_shape(format, n, k);
    source.data = make(n, shape.data_bytes, format.element, source.data_stride, input);
    source.scale =
        make(shape.groups_n, shape.scale_bytes, format.scale, source.scale_stride, input);
    source.zero = make(shape.groups_n, shape.zero_bytes, format.zero, source.zero_stride, input);
  }

 private:
  const void* make(size_t rows, size_t row_bytes, ktk_element element, size_t& stride,
                   Input& input) {
    if (element == KTK_NONE) return nullptr;
    const ktk::Block block = ktk::block_of(element);
    const bool wide = block.columns == 1;  // ggml's blocks and codes are bytes
    stride = row_bytes + block.bytes * input.in<size_t>(0, 2);
    const size_t bytes = (rows - 1) * stride + row_bytes;
    parts_.push_back(std::make_unique<Area>(bytes, wide ? block.bytes : 1));
    std::string some = input.bytes(std::min<size_t>(bytes, 600));
    if (some.empty()) some.push_back(0x3c);
    fill(parts_.back()->data(), bytes, some);
    return parts_.back()->data();
  }

  std::vector<std::unique_ptr<Area>> parts_;
};

inline const ktk::BackendTable& table() {
  static const std::shared_ptr<ktk::BackendTable> copy = ktk::BackendTable::copy(&kFuzzedBackend);
  return *copy;
}

// One of the variants that this CPU can run.
inline const ktk::Variant& variant(Input& input) {
  static const std::vector<const ktk::Variant*> runnable = [] {
    std::vector<const ktk::Variant*> found;
    for (const auto& one : table().variants) {
      if (!(one->required_isa & ~ktk::allowed_isa())) found.push_back(one.get());
    }
    return found;
  }();
  return *runnable[input.in<size_t>(0, runnable.size() - 1)];
}

inline const ktk_accept& accept(Input& input) {
  const auto& all = table().accepts;
  return all[input.in<size_t>(0, all.size() - 1)];
}

// The same floats, where NaN is NaN.
inline bool same(const float* a, const float* b, size_t count) {
  if (count == 0 || std::memcmp(a, b, count * sizeof(float)) == 0) return true;
  for (size_t i = 0; i < count; ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0 && !(a[i] != a[i] && b[i] != b[i])) {
      return false;
    }
  }
  return true;
}

}  // namespace fuzz
