#include "core/cpu.h"

#include <cstdlib>
#include <fstream>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace ktk {
namespace {

struct Name {
  ktk_isa bit;
  const char* name;
};

constexpr Name kNames[] = {
    {KTK_ISA_AVX2, "avx2"},
    {KTK_ISA_AVX_VNNI, "avx_vnni"},
    {KTK_ISA_AVX512, "avx512"},
    {KTK_ISA_AVX512_VNNI, "avx512_vnni"},
    {KTK_ISA_AVX512_BF16, "avx512_bf16"},
    {KTK_ISA_AVX512_VBMI, "avx512_vbmi"},
    {KTK_ISA_AVX512_FP16, "avx512_fp16"},
    {KTK_ISA_AMX_INT8, "amx_int8"},
    {KTK_ISA_AMX_BF16, "amx_bf16"},
    {KTK_ISA_NEON, "neon"},
    {KTK_ISA_DOTPROD, "dotprod"},
    {KTK_ISA_I8MM, "i8mm"},
    {KTK_ISA_ARM_BF16, "arm_bf16"},
    {KTK_ISA_SVE, "sve"},
};

// What a value of KTK_ISA allows: the named set and those that every CPU with it has. So a cap
// stands for the least CPU of its level: "avx512_bf16" is Cooper Lake, which has neither VBMI, FP16
// nor AVX-VNNI (Zen 5 has some of them), while "amx" is Sapphire Rapids and has them all.
struct Cap {
  const char* name;
  ktk_isa allows;
};

#if defined(__x86_64__)

constexpr ktk_isa kAvxVnni = KTK_ISA_AVX2 | KTK_ISA_AVX_VNNI;
constexpr ktk_isa kAvx512 = KTK_ISA_AVX2 | KTK_ISA_AVX512;
constexpr ktk_isa kAvx512Vnni = kAvx512 | KTK_ISA_AVX512_VNNI;
constexpr ktk_isa kAvx512Bf16 = kAvx512Vnni | KTK_ISA_AVX512_BF16;
constexpr ktk_isa kAvx512Vbmi = kAvx512 | KTK_ISA_AVX512_VBMI;
constexpr ktk_isa kAvx512Fp16 = kAvx512Bf16 | KTK_ISA_AVX512_VBMI | KTK_ISA_AVX512_FP16;
constexpr ktk_isa kBelowAmx = kAvx512Fp16 | KTK_ISA_AVX_VNNI;
constexpr ktk_isa kAmx = KTK_ISA_AMX_INT8 | KTK_ISA_AMX_BF16;

constexpr Cap kCaps[] = {
    {"avx2", KTK_ISA_AVX2},
    {"avx_vnni", kAvxVnni},
    {"avx512", kAvx512},
    {"avx512_vnni", kAvx512Vnni},
    {"avx512_bf16", kAvx512Bf16},
    {"avx512_vbmi", kAvx512Vbmi},
    {"avx512_fp16", kAvx512Fp16},
    {"amx_int8", kBelowAmx | KTK_ISA_AMX_INT8},
    {"amx_bf16", kBelowAmx | KTK_ISA_AMX_BF16},
    {"amx", kBelowAmx | kAmx},
};
// Sets that may be there, or be emulated, although CPUID denies them: a hypervisor that hides one
// cannot switch its instructions off while it offers the registers.
constexpr ktk_isa kForced = kAmx | KTK_ISA_AVX_VNNI | KTK_ISA_AVX512_VNNI | KTK_ISA_AVX512_BF16 |
                            KTK_ISA_AVX512_VBMI | KTK_ISA_AVX512_FP16;

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;  // stays zero when the CPU does not know the leaf
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

constexpr bool has(unsigned reg, std::initializer_list<int> bits) {
  for (int bit : bits) {
    if (!(reg >> bit & 1)) return false;
  }
  return true;
}

// Which register states the operating system saves. Only valid after CPUID says OSXSAVE.
uint64_t xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

// Linux hands out the 8 KiB of tile state per thread only to processes that ask (since 5.16).
bool request_amx() {
  constexpr long kGetXcompSupp = 0x1021, kReqXcompPerm = 0x1023, kXtiledata = 18;
  uint64_t supported = 0;
  if (syscall(SYS_arch_prctl, kGetXcompSupp, &supported) != 0) return false;
  if (!(supported >> kXtiledata & 1)) return false;
  return syscall(SYS_arch_prctl, kReqXcompPerm, kXtiledata) == 0;
}

ktk_isa detect() {
  const Registers l1 = cpuid(1, 0), l7 = cpuid(7, 0), ext = cpuid(0x80000001, 0);
  // Subleaf 1 exists only if subleaf 0 says so; older CPUs answer with garbage.
  const Registers l7_1 = l7.eax >= 1 ? cpuid(7, 1) : Registers{};
  constexpr int kOsxsave = 27;
  const uint64_t saved = has(l1.ecx, {kOsxsave}) ? xcr0() : 0;
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;

  ktk_isa isa = KTK_ISA_NONE;
  // FMA, SSE4.2, MOVBE, POPCNT, AVX, F16C; BMI1, AVX2, BMI2; LZCNT: all of x86-64-v3.
  if ((saved & kYmm) != kYmm || !has(l1.ecx, {12, 20, 22, 23, 28, 29}) || !has(l7.ebx, {3, 5, 8}) ||
      !has(ext.ecx, {5})) {
    return isa;
  }
  isa |= KTK_ISA_AVX2;
  if (has(l7_1.eax, {4})) isa |= KTK_ISA_AVX_VNNI;
  // F, DQ, CD, BW, VL.
  if ((saved & kZmm) != kZmm || !has(l7.ebx, {16, 17, 28, 30, 31})) return isa;
  isa |= KTK_ISA_AVX512;
  if (has(l7.ecx, {11})) isa |= KTK_ISA_AVX512_VNNI;
  if (has(l7_1.eax, {5})) isa |= KTK_ISA_AVX512_BF16;
  if (has(l7.ecx, {1})) isa |= KTK_ISA_AVX512_VBMI;
  if (has(l7.edx, {23})) isa |= KTK_ISA_AVX512_FP16;
  constexpr int kAmxTile = 24, kAmxInt8 = 25, kAmxBf16 = 22;
  if ((saved & kTiles) != kTiles || !has(l7.edx, {kAmxTile}) || !request_amx()) return isa;
  if (has(l7.edx, {kAmxInt8})) isa |= KTK_ISA_AMX_INT8;
  if (has(l7.edx, {kAmxBf16})) isa |= KTK_ISA_AMX_BF16;
  return isa;
}

std::string brand() {
  if (cpuid(0x80000000, 0).eax < 0x80000004) return {};
  std::string text;
  for (unsigned leaf = 0x80000002; leaf <= 0x80000004; ++leaf) {
    const Registers r = cpuid(leaf, 0);
    for (unsigned reg : {r.eax, r.ebx, r.ecx, r.edx}) {
      for (int shift = 0; shift < 32; shift += 8) text += static_cast<char>(reg >> shift & 0xff);
    }
  }
  return text.c_str();  // padded with zeros
}

#elif defined(__aarch64__)

constexpr ktk_isa kDotprod = KTK_ISA_NEON | KTK_ISA_DOTPROD;
// Armv8.6 brings I8MM and BF16 together.
constexpr ktk_isa kI8mm = kDotprod | KTK_ISA_I8MM | KTK_ISA_ARM_BF16;

constexpr Cap kCaps[] = {
    {"neon", KTK_ISA_NEON},
    {"dotprod", kDotprod},
    {"i8mm", kI8mm},
    {"arm_bf16", kDotprod | KTK_ISA_ARM_BF16},
    {"sve", kI8mm | KTK_ISA_SVE},
};
constexpr ktk_isa kForced = KTK_ISA_NONE;

ktk_isa detect() {
  const unsigned long caps = getauxval(AT_HWCAP), caps2 = getauxval(AT_HWCAP2);
  // Values of <asm/hwcap.h>, which older systems lack in part.
  constexpr unsigned long kAsimd = 1 << 1, kAsimdDp = 1 << 20, kSve = 1 << 22;
  constexpr unsigned long kI8mm2 = 1 << 13, kBf16 = 1 << 14;
  ktk_isa isa = KTK_ISA_NONE;
  if (caps & kAsimd) isa |= KTK_ISA_NEON;
  if (caps & kAsimdDp) isa |= KTK_ISA_DOTPROD;
  if (caps & kSve) isa |= KTK_ISA_SVE;
  if (caps2 & kI8mm2) isa |= KTK_ISA_I8MM;
  if (caps2 & kBf16) isa |= KTK_ISA_ARM_BF16;
  return isa;
}

std::string brand() { return {}; }

#endif

ktk_isa forced_by_name(std::string_view name) {
  constexpr ktk_isa kAllAmx = KTK_ISA_AMX_INT8 | KTK_ISA_AMX_BF16;
  if (name == "amx") return kAllAmx & kForced;
  for (const Name& row : kNames) {
    if (name == row.name) return row.bit & kForced;
  }
  return KTK_ISA_NONE;
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// The value of the first line of /proc/cpuinfo that starts with `key`.
std::string cpuinfo(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (line.starts_with(key) && colon != std::string::npos) return trimmed(line.substr(colon + 1));
  }
  return {};
}

}  // namespace

ktk_isa detected_isa() {
  static const ktk_isa isa = detect();
  return isa;
}

ktk_isa allowed_isa() {
  const auto setting = [](const char* name) -> std::string_view {
    const char* value = std::getenv(name);
    return value ? value : "";
  };
  const std::string_view force = setting("KTK_ISA_FORCE"), cap = setting("KTK_ISA");
  const ktk_isa present = detected_isa() | (force.empty() ? KTK_ISA_NONE : forced_isa(force));
  return cap.empty() ? present : capped_isa(present, cap);
}

ktk_isa capped_isa(ktk_isa present, std::string_view cap) {
  std::string known;
  for (const Cap& row : kCaps) {
    if (cap == row.name) return row.allows & present;
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  throw SettingError("KTK_ISA is '" + std::string(cap) + "'; expected one of " + known);
}

ktk_isa forced_isa(std::string_view names) {
  ktk_isa forced = KTK_ISA_NONE;
  for (std::string_view rest = names;;) {
    const size_t comma = rest.find(',');
    const ktk_isa one = forced_by_name(rest.substr(0, comma));
    if (one == KTK_ISA_NONE) {
      std::string known;
      for (const std::string& name : isa_names(kForced)) known += name + ", ";
      throw SettingError("KTK_ISA_FORCE is '" + std::string(names) + "'; expected " +
                         (known.empty() ? "nothing on this architecture"
                                        : "some of " + known + "or amx, with commas between them"));
    }
    forced |= one;
    if (comma == rest.npos) return forced;
    rest.remove_prefix(comma + 1);
  }
}

std::vector<std::string> isa_names(ktk_isa isa) {
  std::vector<std::string> names;
  for (const Name& row : kNames) {
    if (isa & row.bit) names.emplace_back(row.name);
    isa &= ~row.bit;
  }
  for (int bit = 0; bit < 64; ++bit) {
    if (isa >> bit & 1) names.push_back("bit " + std::to_string(bit));
  }
  return names;
}

std::string cpu_model_name() {
  if (std::string name = trimmed(brand()); !name.empty()) return name;
  if (std::string name = cpuinfo("model name"); !name.empty()) return name;
  // Arm's kernel gives numbers only.
  const std::string implementer = cpuinfo("CPU implementer"), part = cpuinfo("CPU part");
  if (part.empty()) return "unknown CPU";
  return "CPU implementer " + implementer + " part " + part;
}

}  // namespace ktk
