// ktk/target.h - names for code that is compiled once per instruction set.
//
// The build passes -DKTK_TARGET=<isa>, the name of the instruction set in native/isa/meson.build.
#pragma once

#include "ktk/abi.h"

#define KTK_CONCAT_(a, b) a##b
#define KTK_CONCAT(a, b) KTK_CONCAT_(a, b)
#define KTK_STRING_(a) #a
#define KTK_STRING(a) KTK_STRING_(a)

// ktk_<backend>_<isa>, for example ktk_bf16_avx2: the one symbol a kernel file exports.
#define KTK_VARIANT(backend) KTK_CONCAT(KTK_CONCAT(ktk_, backend), KTK_CONCAT(_, KTK_TARGET))

// What the flags of this translation unit let the compiler emit.
#if defined(__AMX_INT8__)
#define KTK_TARGET_ISA \
  (KTK_ISA_AVX2 | KTK_ISA_AVX512 | KTK_ISA_AVX512_VNNI | KTK_ISA_AVX512_BF16 | KTK_ISA_AMX_INT8)
#elif defined(__AMX_BF16__)
#define KTK_TARGET_ISA \
  (KTK_ISA_AVX2 | KTK_ISA_AVX512 | KTK_ISA_AVX512_VNNI | KTK_ISA_AVX512_BF16 | KTK_ISA_AMX_BF16)
#elif defined(__AVX512BF16__)
#define KTK_TARGET_ISA (KTK_ISA_AVX2 | KTK_ISA_AVX512 | KTK_ISA_AVX512_VNNI | KTK_ISA_AVX512_BF16)
#elif defined(__AVX512VNNI__)
#define KTK_TARGET_ISA (KTK_ISA_AVX2 | KTK_ISA_AVX512 | KTK_ISA_AVX512_VNNI)
#elif defined(__AVX512F__)
#define KTK_TARGET_ISA (KTK_ISA_AVX2 | KTK_ISA_AVX512)
#elif defined(__AVXVNNI__)
#define KTK_TARGET_ISA (KTK_ISA_AVX2 | KTK_ISA_AVX_VNNI)
#elif defined(__AVX2__)
#define KTK_TARGET_ISA KTK_ISA_AVX2
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define KTK_TARGET_ISA (KTK_ISA_NEON | KTK_ISA_DOTPROD | KTK_ISA_I8MM)
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define KTK_TARGET_ISA (KTK_ISA_NEON | KTK_ISA_DOTPROD | KTK_ISA_ARM_BF16)
#elif defined(__ARM_FEATURE_DOTPROD)
#define KTK_TARGET_ISA (KTK_ISA_NEON | KTK_ISA_DOTPROD)
#elif defined(__aarch64__)
#define KTK_TARGET_ISA KTK_ISA_NEON
#else
#define KTK_TARGET_ISA KTK_ISA_NONE
#endif
