// ktk/isa.h - the list of instruction sets, which all that differs between them is made from.
//
// KTK_ISA_X86(X) and KTK_ISA_ARM(X) call X once for each, in the order of the bits of abi.h:
//
//   X(bit, name, compiler, extends, with, cpu)
//
//   bit        KTK_ISA_<bit> of abi.h
//   name       what users type, and native/isa/meson.build and native/probe call it
//   compiler   the macro that compilers define as 1 when they may emit it
//   extends    the set without which it does not count as present
//   with       what every CPU with it has besides: `KTK_ISA=<name>` leaves all of that
//   cpu        how the CPU and the operating system say that they have it (native/core/cpu.cc)
#pragma once

#include "ktk/abi.h"

// clang-format off
#define KTK_ISA_X86(X)                                                                             \
  /* x86-64-v3 with FMA, MOVBE, POPCNT, AVX, F16C; BMI1, AVX2, BMI2; LZCNT */                      \
  X(AVX2, avx2, __AVX2__, KTK_ISA_NONE, KTK_ISA_NONE,                                              \
    cpu.saves_ymm() && cpu.leaf1_ecx(12, 20, 22, 23, 28, 29) && cpu.leaf7_ebx(3, 5, 8) &&          \
        cpu.extended_ecx(5))                                                                       \
  X(AVX_VNNI, avx_vnni, __AVXVNNI__, KTK_ISA_AVX2, KTK_ISA_NONE, cpu.leaf7_1_eax(4))               \
  /* x86-64-v4: F, DQ, CD, BW, VL */                                                               \
  X(AVX512, avx512, __AVX512F__, KTK_ISA_AVX2, KTK_ISA_NONE,                                       \
    cpu.saves_zmm() && cpu.leaf7_ebx(16, 17, 28, 30, 31))                                          \
  X(AVX512_VNNI, avx512_vnni, __AVX512VNNI__, KTK_ISA_AVX512, KTK_ISA_NONE, cpu.leaf7_ecx(11))     \
  X(AVX512_BF16, avx512_bf16, __AVX512BF16__, KTK_ISA_AVX512, KTK_ISA_AVX512_VNNI,                 \
    cpu.leaf7_1_eax(5))                                                                            \
  /* VBMI and GFNI */                                                                              \
  X(AVX512_VBMI, avx512_vbmi, __AVX512VBMI__, KTK_ISA_AVX512, KTK_ISA_NONE,                        \
    cpu.leaf7_ecx(1) && cpu.leaf7_ecx(8))                                                          \
  X(AVX512_FP16, avx512_fp16, __AVX512FP16__, KTK_ISA_AVX512,                                      \
    KTK_ISA_AVX512_BF16 | KTK_ISA_AVX512_VBMI, cpu.leaf7_edx(23))                                  \
  /* Bit 24 is AMX-TILE */                                                                         \
  X(AMX_INT8, amx_int8, __AMX_INT8__, KTK_ISA_AVX512,                                              \
    KTK_ISA_AVX512_FP16 | KTK_ISA_AVX_VNNI, cpu.leaf7_edx(24, 25) && cpu.saves_tiles())            \
  X(AMX_BF16, amx_bf16, __AMX_BF16__, KTK_ISA_AVX512,                                              \
    KTK_ISA_AVX512_FP16 | KTK_ISA_AVX_VNNI, cpu.leaf7_edx(24, 22) && cpu.saves_tiles())

// Bits of <asm/hwcap.h>, which older systems lack in part.
#define KTK_ISA_ARM(X)                                                                             \
  X(NEON, neon, __ARM_NEON, KTK_ISA_NONE, KTK_ISA_NONE, cpu.hwcap(1))                              \
  X(DOTPROD, dotprod, __ARM_FEATURE_DOTPROD, KTK_ISA_NEON, KTK_ISA_NONE, cpu.hwcap(20))            \
  /* Armv8.6 brings both */                                                                        \
  X(I8MM, i8mm, __ARM_FEATURE_MATMUL_INT8, KTK_ISA_NEON, KTK_ISA_DOTPROD | KTK_ISA_ARM_BF16,       \
    cpu.hwcap2(13))                                                                                \
  X(ARM_BF16, arm_bf16, __ARM_FEATURE_BF16_VECTOR_ARITHMETIC, KTK_ISA_NEON, KTK_ISA_DOTPROD,       \
    cpu.hwcap2(14))                                                                                \
  X(SVE, sve, __ARM_FEATURE_SVE, KTK_ISA_NEON, KTK_ISA_I8MM, cpu.hwcap(22))
// clang-format on

#if defined(__aarch64__)
#define KTK_ISA_HERE(X) KTK_ISA_ARM(X)
#else
#define KTK_ISA_HERE(X) KTK_ISA_X86(X)
#endif

// 1 for a macro that is defined as 1, or else 0: what an #if could tell, inside an expression.
#define KTK_IS_ONE(macro) KTK_IS_ONE_1_(macro)
#define KTK_IS_ONE_1_(value) KTK_IS_ONE_2_(KTK_BEFORE_##value)
#define KTK_IS_ONE_2_(comma) KTK_SECOND_(comma 1, 0, 0)
#define KTK_BEFORE_1 0,
#define KTK_SECOND_(first, second, ...) second

// What the compiler may emit in this translation unit, by the flags that it was given.
#define KTK_TARGET_ISA (KTK_ISA_NONE KTK_ISA_HERE(KTK_ISA_IF_TARGET_))
#define KTK_ISA_IF_TARGET_(bit, name, compiler, ...) \
  | (KTK_IS_ONE(compiler) ? KTK_ISA_##bit : KTK_ISA_NONE)
