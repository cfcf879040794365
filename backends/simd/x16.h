// Sixteen values at a time, whatever registers an instruction set holds them in: F32x16 and I32x16.
//
//   load_f32, load_f16, load_bf16   of floats
//   round_product, round_quotient   x * factor or x / divisor as integers, to nearest even
//   narrow                          int32 as bytes, those beyond their range as the nearest one
//   store_words                     int32 as int16, likewise; x86 only
//   store_product                   bytes as f32, each times a factor
//
// Unnamed namespaces, as in all headers of kernels: each library keeps the copy that was compiled
// with its own flags.
#pragma once

#if defined(__aarch64__)
#include "simd/x16_neon.h"
#elif defined(__AVX512F__)
#include "simd/x16_avx512.h"
#else
#include "simd/x16_avx2.h"
#endif

#if !defined(__aarch64__)
namespace ktk {
namespace {

inline __m128i load_bytes(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
inline void store_bytes(uint8_t* p, __m128i bytes) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

}  // namespace
}  // namespace ktk
#endif
