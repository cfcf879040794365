// Functions that each leave one register changed, and are told by its name.
#include <stdexcept>
#include <string>

#include "check.h"
#include "core/cpu.h"
#include "core/registers.h"

// A function of no C++: `name` does `body` and returns.
#define ASSEMBLY(name, ...)    \
  extern "C" void name(void*); \
  asm(".text\n.p2align 4\n.globl " #name "\n.hidden " #name "\n" #name ":\n" __VA_ARGS__);

#if defined(__x86_64__)
ASSEMBLY(keeps_all, "push %rbx\n xor %ebx, %ebx\n pop %rbx\n std\n cld\n ret")
ASSEMBLY(loses_rbx, "xor %ebx, %ebx\n ret")
ASSEMBLY(loses_rbp, "not %rbp\n ret")
ASSEMBLY(loses_r12, "inc %r12\n ret")
ASSEMBLY(loses_r13, "inc %r13\n ret")
ASSEMBLY(loses_r14, "inc %r14\n ret")
ASSEMBLY(loses_r15, "inc %r15\n ret")
ASSEMBLY(loses_stack, "ret $16")
ASSEMBLY(leaves_direction, "std\n ret")
ASSEMBLY(flushes_to_zero,
         "push $0\n stmxcsr (%rsp)\n xorl $0x8040, (%rsp)\n ldmxcsr (%rsp)\n pop %rax\n ret")
ASSEMBLY(raises_inexact,
         "push $0\n stmxcsr (%rsp)\n xorl $0x20, (%rsp)\n ldmxcsr (%rsp)\n pop %rax\n ret")
ASSEMBLY(rounds_x87,
         "push $0\n fnstcw (%rsp)\n xorl $0xc00, (%rsp)\n fldcw (%rsp)\n pop %rax\n ret")
ASSEMBLY(leaves_ymm, "vpcmpeqd %ymm7, %ymm7, %ymm7\n ret")
ASSEMBLY(leaves_zmm, "vpternlogd $255, %zmm7, %zmm7, %zmm7\n ret")
ASSEMBLY(clears_upper, "vpcmpeqd %ymm7, %ymm7, %ymm7\n vzeroupper\n ret")
#else
ASSEMBLY(keeps_all, "str x19, [sp, -16]!\n mov x19, 0\n ldr x19, [sp], 16\n ret")
ASSEMBLY(loses_stack, "sub sp, sp, 32\n ret")
ASSEMBLY(flushes_to_zero, "mrs x9, fpcr\n eor x9, x9, 1 << 24\n msr fpcr, x9\n ret")
// clang-format off
#define EACH(X) \
  X(x19, "mvn") X(x20, "mvn") X(x21, "mvn") X(x22, "mvn") X(x23, "mvn") X(x24, "mvn") \
  X(x25, "mvn") X(x26, "mvn") X(x27, "mvn") X(x28, "mvn") X(x29, "mvn") \
  X(d8, "fneg") X(d9, "fneg") X(d10, "fneg") X(d11, "fneg") X(d12, "fneg") X(d13, "fneg") \
  X(d14, "fneg") X(d15, "fneg")
// clang-format on
#define LOSES(name, instruction) ASSEMBLY(loses_##name, instruction " " #name ", " #name "\n ret")
EACH(LOSES)
// Only the lower half of v8 is the caller's.
ASSEMBLY(loses_upper_v8, "mov v8.d[1], xzr\n ret")
#endif

namespace {

std::string changed(void (*function)(void*)) {
  return ktk::changed_registers(function, nullptr, true);
}

TEST(a_function_that_keeps_registers_has_none) {
  CHECK_EQ(changed(keeps_all), "");
  bool called = false;
  const auto call = [](void* flag) { *static_cast<bool*>(flag) = true; };
  CHECK_EQ(ktk::changed_registers(call, &called, false), "");
  CHECK(called);
}

TEST(exceptions_go_through) {
  const auto throws = [](void*) { throw std::runtime_error("from below"); };
  for (int i = 0; i < 2; ++i)
    CHECK_EQ(CHECK_THROWS(std::runtime_error, changed(throws)), "from below");
}

TEST(what_is_lost_is_named_and_put_right) {
  for (int i = 0; i < 2; ++i) {
#if defined(__x86_64__)
    CHECK_EQ(changed(loses_rbx), "rbx");
    CHECK_EQ(changed(loses_rbp), "rbp");
    CHECK_EQ(changed(loses_r12), "r12");
    CHECK_EQ(changed(loses_r13), "r13");
    CHECK_EQ(changed(loses_r14), "r14");
    CHECK_EQ(changed(loses_r15), "r15");
    CHECK_EQ(changed(loses_stack), "rsp");
    CHECK_EQ(changed(leaves_direction), "direction flag");
    CHECK_EQ(changed(flushes_to_zero), "mxcsr");
    CHECK_EQ(changed(raises_inexact), "");
    CHECK_EQ(changed(rounds_x87), "x87 control word");
#else
#define CHECK_NAME(name, instruction) CHECK_EQ(changed(loses_##name), #name);
    EACH(CHECK_NAME)
    CHECK_EQ(changed(loses_upper_v8), "");
    CHECK_EQ(changed(loses_stack), "sp");
    CHECK_EQ(changed(flushes_to_zero), "fpcr");
#endif
    CHECK_EQ(changed(keeps_all), "");
  }
}

#if defined(__x86_64__)
TEST(upper_halves_are_seen_where_the_cpu_tells) {
  const std::string upper = "upper halves of vectors";
  // All CPUs with AVX-512 have XGETBV with ECX = 1.
  if (ktk::allowed_isa() & KTK_ISA_AVX512) {
    CHECK_EQ(changed(leaves_ymm), upper);
    CHECK_EQ(changed(leaves_zmm), upper);
  }
  if (ktk::allowed_isa() & KTK_ISA_AVX2) CHECK_EQ(changed(clears_upper), "");
}
#endif

}  // namespace
