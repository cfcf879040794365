#include "core/cpu.h"

#include <cstdlib>
#include <fstream>

#include "ktk/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace ktk {
namespace {

struct Set {
  ktk_isa bit;
  const char* name;
  ktk_isa others;  // what every CPU with it has besides
};

#define KTK_ROW(bit, name, compiler, extends, with, cpu) {KTK_ISA_##bit, #name, (extends) | (with)},
constexpr Set kSets[] = {KTK_ISA_X86(KTK_ROW) KTK_ISA_ARM(KTK_ROW)};

// What a value of KTK_ISA allows: the named sets and those that every CPU with them has. So a cap
// stands for the least CPU of its level: "avx512_bf16" is Cooper Lake, which has neither VBMI, FP16
// nor AVX-VNNI (Zen 5 has some of them), while "amx" is Sapphire Rapids and has them all.
struct Cap {
  const char* name;
  ktk_isa sets;

  constexpr ktk_isa allows() const {
    ktk_isa all = sets;
    for (ktk_isa before = KTK_ISA_NONE; before != all;) {
      before = all;
      for (const Set& set : kSets) {
        if (all & set.bit) all |= set.others;
      }
    }
    return all;
  }
};

#define KTK_CAP(bit, name, ...) {#name, KTK_ISA_##bit},

#if defined(__x86_64__)

constexpr ktk_isa kAmx = KTK_ISA_AMX_INT8 | KTK_ISA_AMX_BF16;
constexpr Cap kCaps[] = {KTK_ISA_X86(KTK_CAP){"amx", kAmx}};
// Sets that may be there, or be emulated, although CPUID denies them: a hypervisor that hides one
// cannot switch its instructions off while it offers the registers.
#define KTK_OR(bit, ...) | KTK_ISA_##bit
constexpr ktk_isa kForced = (KTK_ISA_NONE KTK_ISA_X86(KTK_OR)) & ~(KTK_ISA_AVX2 | KTK_ISA_AVX512);

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;  // stays zero when the CPU does not know the leaf
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
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

// What isa.h asks of a CPU: whether a register of a leaf of CPUID has all of some bits.
class Cpu {
 public:
  bool leaf1_ecx(auto... bits) const { return has(leaf1_.ecx, bits...); }
  bool leaf7_ebx(auto... bits) const { return has(leaf7_.ebx, bits...); }
  bool leaf7_ecx(auto... bits) const { return has(leaf7_.ecx, bits...); }
  bool leaf7_edx(auto... bits) const { return has(leaf7_.edx, bits...); }
  bool leaf7_1_eax(auto... bits) const { return has(leaf7_1_.eax, bits...); }
  bool extended_ecx(auto... bits) const { return has(extended_.ecx, bits...); }

  bool saves_ymm() const { return saves(0x6); }
  bool saves_zmm() const { return saves(0xe6); }
  bool saves_tiles() const { return saves(0x60000) && request_amx(); }

 private:
  static bool has(unsigned reg, auto... bits) { return ((reg >> bits & 1) && ...); }
  bool saves(uint64_t states) const { return (saved_ & states) == states; }

  Registers leaf1_ = cpuid(1, 0), leaf7_ = cpuid(7, 0), extended_ = cpuid(0x80000001, 0);
  // Subleaf 1 exists only if subleaf 0 says so; older CPUs answer with garbage.
  Registers leaf7_1_ = leaf7_.eax >= 1 ? cpuid(7, 1) : Registers{};
  static constexpr int kOsxsave = 27;
  uint64_t saved_ = leaf1_ecx(kOsxsave) ? xcr0() : 0;
};

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

CpuId identify() {
  CpuId id;
  const Registers vendor = cpuid(0, 0);
  for (const unsigned part : {vendor.ebx, vendor.edx, vendor.ecx}) {
    for (int shift = 0; shift < 32; shift += 8) id.vendor += static_cast<char>(part >> shift);
  }
  const unsigned eax = cpuid(1, 0).eax, family = eax >> 8 & 0xf, model = eax >> 4 & 0xf;
  id.family = family == 0xf ? family + (eax >> 20 & 0xff) : family;
  id.model = family == 0xf || family == 6 ? model | (eax >> 16 & 0xf) << 4 : model;
  return id;
}

#elif defined(__aarch64__)

constexpr Cap kCaps[] = {KTK_ISA_ARM(KTK_CAP)};
constexpr ktk_isa kForced = KTK_ISA_NONE;

// What isa.h asks of a CPU.
class Cpu {
 public:
  bool hwcap(int bit) const { return getauxval(AT_HWCAP) >> bit & 1; }
  bool hwcap2(int bit) const { return getauxval(AT_HWCAP2) >> bit & 1; }
};

std::string brand() { return {}; }
CpuId identify() { return {}; }

#endif

ktk_isa detect() {
  const Cpu cpu;
  ktk_isa isa = KTK_ISA_NONE;
#define KTK_DETECT(bit, name, compiler, extends, with, present) \
  if ((isa & (extends)) == (extends) && (present)) isa |= KTK_ISA_##bit;
  KTK_ISA_HERE(KTK_DETECT)
  return isa;
}

ktk_isa sets_by_name(std::string_view name) {
  for (const Cap& row : kCaps) {
    if (name == row.name) return row.sets;
  }
  return KTK_ISA_NONE;
}

// The value of a variable of the environment.
std::string_view setting(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
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
  const std::string_view force = setting("KTK_ISA_FORCE"), cap = setting("KTK_ISA");
  const ktk_isa present = detected_isa() | (force.empty() ? KTK_ISA_NONE : forced_isa(force));
  return cap.empty() ? present : capped_isa(present, cap);
}

ktk_isa capped_isa(ktk_isa present, std::string_view cap) {
  std::string known;
  for (const Cap& row : kCaps) {
    if (cap == row.name) return row.allows() & present;
    known += (known.empty() ? "" : ", ") + std::string(row.name);
  }
  throw SettingError("KTK_ISA is '" + std::string(cap) + "'; expected one of " + known);
}

ktk_isa forced_isa(std::string_view names) {
  ktk_isa forced = KTK_ISA_NONE;
  for (std::string_view rest = names;;) {
    const size_t comma = rest.find(',');
    const ktk_isa one = sets_by_name(rest.substr(0, comma)) & kForced;
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

ktk_isa named_isa() {
  ktk_isa named = sets_by_name(setting("KTK_ISA"));
  for (std::string_view rest = setting("KTK_ISA_FORCE"); !rest.empty();) {
    const size_t comma = rest.find(',');
    named |= sets_by_name(rest.substr(0, comma));
    rest.remove_prefix(comma == rest.npos ? rest.size() : comma + 1);
  }
  return named;
}

std::vector<std::string> isa_names(ktk_isa isa) {
  std::vector<std::string> names;
  for (const Set& set : kSets) {
    if (isa & set.bit) names.emplace_back(set.name);
    isa &= ~set.bit;
  }
  for (int bit = 0; bit < 64; ++bit) {
    if (isa >> bit & 1) names.push_back("bit " + std::to_string(bit));
  }
  return names;
}

CpuId cpu_id() {
  static const CpuId id = identify();  // once: a virtual machine leaves its guest for each CPUID
  return id;
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
