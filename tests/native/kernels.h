// Weights for the backend of a test, and which of its kernels run here.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "backend.h"
#include "core/cpu.h"
#include "core/topology.h"
#include "format/elements.h"
#include "format/format.h"

namespace {

// The formats of weights that the backend is given.
const std::span kGiven(kBackend.formats, kBackend.num_formats);

std::vector<uint16_t> random_bf16(size_t count, float scale, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) value = std::bit_cast<uint32_t>(normal(random)) >> 16;
  return values;
}

// Bits, as f16 or bf16, of a number that both hold and that is 0 or positive and normal.
uint16_t to_16_bits(ktk_element element, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (element == KTK_BF16) return static_cast<uint16_t>(bits >> 16);
  return static_cast<uint16_t>(value == 0 ? 0 : (bits >> 13) - (112u << 10));
}

float to_f32(uint16_t bf16) { return std::bit_cast<float>(static_cast<uint32_t>(bf16) << 16); }

// A weight matrix of any format in arrays of exactly the size it needs.
struct Weight {
  std::vector<uint16_t> bf16, float_zeros;
  std::vector<uint8_t> codes, exponents, zeros;
  std::vector<float> scales;
  ktk_source source{};

  Weight(const ktk_format& format, size_t n, size_t k, unsigned seed) {
    source.format = format;
    if (format.element == KTK_BF16) {
      bf16 = random_bf16(n * k, 0.1f, seed);
      source.data = bf16.data();
      source.data_stride = k * sizeof(uint16_t);
      return;
    }
    std::mt19937 random(seed);
    const ktk::Block block = ktk::block_of(format.element);
    source.data_stride = block.bytes_of(k);
    codes.resize(n * source.data_stride);
    for (uint8_t& code : codes) {
      do code = static_cast<uint8_t>(random());
      while (format.element == KTK_E4M3 && (code & 0x7f) == 0x7f);  // NaN
    }
    source.data = codes.data();
    if (ktk::is_ggml(format.element)) {
      // Blocks of the types that are given begin with one f16 scale, or two: 1.25 * 2^-11.
      const uint16_t scales[] = {0x1100, 0x1100};
      for (size_t i = 0; i < codes.size(); i += block.bytes) {
        std::memcpy(&codes[i], scales, sizeof scales);
      }
      return;
    }
    const ktk::SourceShape shape = ktk::source_shape(format, n, k);
    const size_t columns = shape.groups_k, count = shape.groups_n * columns;
    const int exponent = format.element == KTK_E4M3 ? -11 : -5;
    for (size_t i = 0; i < count; ++i) {
      const int e = exponent + static_cast<int>(random() % 3);
      exponents.push_back(static_cast<uint8_t>(127 + e));
      scales.push_back(1.25f * std::ldexp(1.0f, e));
    }
    if (format.zero == KTK_U8) {
      for (size_t i = 0; i < count; ++i) zeros.push_back(static_cast<uint8_t>(random() % 17));
      source.zero = zeros.data();
      source.zero_stride = columns;
    } else if (format.zero != KTK_NONE) {
      for (size_t i = 0; i < count; ++i) {
        float_zeros.push_back(to_16_bits(format.zero, static_cast<float>(random() % 65) / 4));
      }
      source.zero = float_zeros.data();
      source.zero_stride = columns * sizeof float_zeros[0];
    }
    const auto take = [&](const auto& all) {
      source.scale = all.data();
      source.scale_stride = columns * sizeof all[0];
    };
    if (format.scale == KTK_F32) {
      take(scales);
    } else if (format.scale == KTK_UE8M0) {
      take(exponents);
    } else if (format.scale == KTK_E4M3) {
      for (uint8_t& e : exponents) e = static_cast<uint8_t>((e - 120) << 3 | 2);
      take(exponents);
    } else {
      // 1.25 times a power of two.
      const bool is_bf16 = format.scale == KTK_BF16;
      for (const uint8_t e : exponents) {
        bf16.push_back(static_cast<uint16_t>(is_bf16 ? e << 7 | 0x20 : (e - 112) << 10 | 0x100));
      }
      take(bf16);
    }
  }
};

[[maybe_unused]] std::vector<std::string> runnable() {
  std::vector<std::string> names;
  for (const ktk_variant* variant : std::span(kBackend.variants, kBackend.num_variants)) {
    if (!(variant->required_isa & ~ktk::allowed_isa())) names.emplace_back(variant->name);
  }
  return names;
}

// Four nodes that share a CPU: what counts is where workers are said to be.
[[maybe_unused]] ktk::Topology four_nodes() {
  ktk::Topology topology;
  for (int id = 0; id < 4; ++id) {
    topology.nodes.push_back(
        {.id = id, .cores = {id}, .cpus = {id}, .has_memory = true, .core_of = {id}});
  }
  return topology;
}

}  // namespace
