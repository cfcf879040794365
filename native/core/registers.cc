#include "core/registers.h"

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

// What the assembly below reads and writes, by offsets; each is checked.
struct ktk_registers {
#if defined(__x86_64__)
  static constexpr int kCount = 6;
  static constexpr const char* kNames[kCount] = {"rbx", "rbp", "r12", "r13", "r14", "r15"};
#else
  static constexpr int kCount = 19;
  static constexpr const char* kNames[kCount] = {"x19", "x20", "x21", "x22", "x23", "x24", "x25",
                                                 "x26", "x27", "x28", "x29", "d8",  "d9",  "d10",
                                                 "d11", "d12", "d13", "d14", "d15"};
#endif
  uint64_t given[kCount], found[kCount];
  uint64_t stack_before, stack_after;
  uint64_t floats_before, floats_after;  // mxcsr or fpcr
  // Of x86-64 only.
  uint64_t x87_before, x87_after;
  uint64_t flags;
  uint64_t has_in_use, in_use;  // XINUSE
};

extern "C" {
__attribute__((visibility("hidden"))) void ktk_call_with_registers(void (*function)(void*),
                                                                   void* argument,
                                                                   ktk_registers* registers);
// Where the frame is: a function that loses the stack pointer leaves no register to find it by.
__attribute__((visibility("hidden"), used)) void* ktk_registers_frame = nullptr;
}

#if defined(__x86_64__)

static_assert(offsetof(ktk_registers, found) == 48);
static_assert(offsetof(ktk_registers, stack_before) == 96);
static_assert(offsetof(ktk_registers, has_in_use) == 152);
asm(R"(
.text
.p2align 4
.hidden ktk_call_with_registers
.globl ktk_call_with_registers
.type ktk_call_with_registers, @function
ktk_call_with_registers:
  .cfi_startproc
.irp register, rbx, rbp, r12, r13, r14, r15
  push %\register
  .cfi_adjust_cfa_offset 8
  .cfi_rel_offset \register, 0
.endr
  push %rdx
  .cfi_adjust_cfa_offset 8
  mov %rsp, ktk_registers_frame(%rip)
  mov %rsp, 96(%rdx)
  stmxcsr 112(%rdx)
  fnstcw 128(%rdx)
  cmpq $0, 152(%rdx)
  je 1f
  vzeroupper
1:
  mov 0(%rdx), %rbx
  mov 8(%rdx), %rbp
  mov 16(%rdx), %r12
  mov 24(%rdx), %r13
  mov 32(%rdx), %r14
  mov 40(%rdx), %r15
  mov %rdi, %rax
  mov %rsi, %rdi
  call *%rax
  mov %rsp, %rcx
  mov ktk_registers_frame(%rip), %rsp
  mov (%rsp), %r8
  mov %rcx, 104(%r8)
  pushfq
  pop 144(%r8)
  cld
  mov %rbx, 48(%r8)
  mov %rbp, 56(%r8)
  mov %r12, 64(%r8)
  mov %r13, 72(%r8)
  mov %r14, 80(%r8)
  mov %r15, 88(%r8)
  stmxcsr 120(%r8)
  ldmxcsr 112(%r8)
  fnstcw 136(%r8)
  fldcw 128(%r8)
  cmpq $0, 152(%r8)
  je 2f
  mov $1, %ecx
  xgetbv
  shl $32, %rdx
  or %rdx, %rax
  mov %rax, 160(%r8)
  vzeroupper
2:
  pop %rdx
  .cfi_adjust_cfa_offset -8
.irp register, r15, r14, r13, r12, rbp, rbx
  pop %\register
  .cfi_adjust_cfa_offset -8
  .cfi_restore \register
.endr
  ret
  .cfi_endproc
.size ktk_call_with_registers, . - ktk_call_with_registers
)");

#else

static_assert(offsetof(ktk_registers, found) == 152);
static_assert(offsetof(ktk_registers, stack_before) == 304);
static_assert(offsetof(ktk_registers, floats_before) == 320);
// Pairs of registers, where they stand in the frame, among what is given and among what is found.
asm(R"(
.macro ktk_each_pair do
  \do x19, x20, 16, 0, 152
  \do x21, x22, 32, 16, 168
  \do x23, x24, 48, 32, 184
  \do x25, x26, 64, 48, 200
  \do x27, x28, 80, 64, 216
  \do d8, d9, 96, 88, 240
  \do d10, d11, 112, 104, 256
  \do d12, d13, 128, 120, 272
  \do d14, d15, 144, 136, 288
.endm
.macro ktk_save first, second, frame, given, found
  stp \first, \second, [sp, \frame]
  .cfi_rel_offset \first, \frame
  .cfi_rel_offset \second, \frame + 8
.endm
.macro ktk_give first, second, frame, given, found
  ldp \first, \second, [x2, \given]
.endm
.macro ktk_find first, second, frame, given, found
  stp \first, \second, [x9, \found]
.endm
.macro ktk_restore first, second, frame, given, found
  ldp \first, \second, [sp, \frame]
  .cfi_restore \first
  .cfi_restore \second
.endm
.text
.p2align 4
.hidden ktk_call_with_registers
.globl ktk_call_with_registers
.type ktk_call_with_registers, %function
ktk_call_with_registers:
  .cfi_startproc
  stp x29, x30, [sp, -176]!
  .cfi_adjust_cfa_offset 176
  .cfi_rel_offset x29, 0
  .cfi_rel_offset x30, 8
  ktk_each_pair ktk_save
  str x2, [sp, 160]
  mov x9, sp
  adrp x10, ktk_registers_frame
  str x9, [x10, :lo12:ktk_registers_frame]
  str x9, [x2, 304]
  mrs x9, fpcr
  str x9, [x2, 320]
  ktk_each_pair ktk_give
  ldr x29, [x2, 80]
  mov x9, x0
  mov x0, x1
  blr x9
  mov x11, sp
  adrp x10, ktk_registers_frame
  ldr x9, [x10, :lo12:ktk_registers_frame]
  mov sp, x9
  ldr x9, [sp, 160]
  str x11, [x9, 312]
  ktk_each_pair ktk_find
  str x29, [x9, 232]
  mrs x11, fpcr
  str x11, [x9, 328]
  ldr x11, [x9, 320]
  msr fpcr, x11
  ktk_each_pair ktk_restore
  ldp x29, x30, [sp], 176
  .cfi_adjust_cfa_offset -176
  .cfi_restore x29
  .cfi_restore x30
  ret
  .cfi_endproc
.size ktk_call_with_registers, . - ktk_call_with_registers
)");

#endif

namespace ktk {
namespace {

#if defined(__x86_64__)
constexpr uint64_t kDirection = 1 << 10, kUpper = 1 << 2 | 1 << 6, kTiles = 3 << 17;
constexpr uint64_t kFloats = 0xffc0;  // mxcsr without the flags of exceptions

// Whether the system lets us have AVX, and XGETBV tells what is in use.
bool has_in_use() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_AVX)) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & 4) && __get_cpuid_count(0xd, 1, &a, &b, &c, &d) && (a & 4);
}
#else
constexpr uint64_t kDirection = 0, kUpper = 0, kTiles = 0, kFloats = ~uint64_t{0};
bool has_in_use() { return false; }
#endif

}  // namespace

std::string changed_registers(void (*function)(void*), void* argument, bool tiles) {
  static std::mutex one_frame;
  const std::lock_guard lock(one_frame);
  ktk_registers r{};
  for (int i = 0; i < r.kCount; ++i)
    r.given[i] = 0x9e3779b97f4a7c15u * (static_cast<uint64_t>(i) + 1);
  r.has_in_use = has_in_use();
  ktk_call_with_registers(function, argument, &r);

  std::string names;
  const auto add = [&](bool changed, const char* name) {
    if (changed) names += (names.empty() ? "" : ", ") + std::string(name);
  };
  for (int i = 0; i < r.kCount; ++i) add(r.found[i] != r.given[i], r.kNames[i]);
  const bool x86 = r.kCount == 6;
  add(r.stack_after != r.stack_before, x86 ? "rsp" : "sp");
  add((r.floats_after ^ r.floats_before) & kFloats, x86 ? "mxcsr" : "fpcr");
  add(r.x87_after != r.x87_before, "x87 control word");
  add(r.flags & kDirection, "direction flag");
  add(r.in_use & kUpper, "upper halves of vectors");
  add(tiles && (r.in_use & kTiles), "tiles");
  return names;
}

}  // namespace ktk
