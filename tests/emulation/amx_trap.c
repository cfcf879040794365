/* Runs AMX instructions that the machine refuses: a SIGILL handler around amx_soft.c.
 *
 * Linux sends SIGILL in two situations, and the handler serves both:
 *   - The CPU has no AMX. Every AMX instruction traps and is done in software.
 *   - The CPU has AMX, but the process never got the permission for tile data (arch_prctl). Then
 *     ldtilecfg, sttilecfg and tilerelease run natively, because they touch no tile data, and all
 *     others trap. The configuration comes from the saved registers in the signal frame.
 * Everything that is no AMX goes to the handler that was there before.
 */
#define _GNU_SOURCE
#include <cpuid.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include "amx_soft.h"

static uint64_t counts[kAmxOps];
static uint64_t tile_loads[kTiles], tile_stores[kTiles], tile_products[kTiles];
static struct sigaction previous;
static int installed, cpu_has_amx;
static uint32_t config_offset; /* of the tile configuration in an XSAVE area */

/* mmap and not a thread-local array: 8 KiB of static TLS are more than dlopen() has to give. */
static __thread amx_tiles* thread_tiles __attribute__((tls_model("initial-exec")));

static int is_config(amx_op op) { return op <= kTilerelease; }

/* The tile configuration of the interrupted code, where the CPU holds it; NULL if it is the
 * initial one. The frame has the standard XSAVE format: header at 512, Linux's own words at 464. */
static const uint8_t* saved_config(const ucontext_t* context) {
  enum { kConfigBit = 17 };
  const uint8_t* area = (const uint8_t*)context->uc_mcontext.fpregs;
  uint32_t magic;
  uint64_t in_use;
  if (!area) return NULL;
  memcpy(&magic, area + 464, sizeof magic);
  memcpy(&in_use, area + 512, sizeof in_use);
  if (magic != 0x46505853u /* FP_XSTATE_MAGIC1 */ || !(in_use >> kConfigBit & 1)) return NULL;
  return area + config_offset;
}

/* Makes the software tiles agree with it. Reloading an equal configuration cannot be seen here:
 * the tiles then keep their contents where the hardware clears them. */
static void follow_config(amx_tiles* tiles, const uint8_t* saved) {
  static const uint8_t kInitial[kConfigBytes];
  uint8_t current[kConfigBytes];
  amx_store_config(tiles, current);
  if (!saved) saved = kInitial;
  if (memcmp(saved, current, kConfigBytes) != 0) (void)amx_load_config(tiles, saved);
}

/* By tile: what a load fills, a store empties and a product adds to. */
static void count(const amx_insn* insn) {
  __atomic_fetch_add(&counts[insn->op], 1, __ATOMIC_RELAXED);
  uint64_t* by_tile = insn->op == kTileloadd || insn->op == kTileloaddt1 ? tile_loads
                      : insn->op == kTilestored                          ? tile_stores
                      : insn->op >= kTdpbssd                             ? tile_products
                                                                         : NULL;
  if (by_tile) __atomic_fetch_add(&by_tile[insn->dst], 1, __ATOMIC_RELAXED);
}

static void say(const char* text) { (void)!write(STDERR_FILENO, text, strlen(text)); }

static void on_sigill(int signal, siginfo_t* info, void* raw_context) {
  (void)signal, (void)info;
  ucontext_t* context = raw_context;
  greg_t* g = context->uc_mcontext.gregs;
  static const int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                               REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                               REG_R12, REG_R13, REG_R14, REG_R15};
  uint64_t regs[16], fs_base;
  for (int i = 0; i < 16; ++i) regs[i] = (uint64_t)g[kOrder[i]];
  __asm__("mov %%fs:0, %0" : "=r"(fs_base));

  amx_tiles* tiles = thread_tiles;
  if (!tiles) {
    tiles = mmap(NULL, sizeof *tiles, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (tiles == MAP_FAILED) _exit(125);
    thread_tiles = tiles;
  }
  if (cpu_has_amx) follow_config(tiles, saved_config(context));

  /* A run of AMX instructions costs one trap. One that faults in mid-run traps again by itself. */
  amx_insn insn;
  int done = 0;
  while (amx_decode((const uint8_t*)g[REG_RIP], regs, fs_base, &insn)) {
    if (cpu_has_amx && is_config(insn.op) && done) return;
    const char* fault = amx_execute(tiles, &insn);
    if (fault) {
      if (done) return;
      say("amx_trap: the hardware would refuse this instruction: ");
      say(fault);
      say("\n");
      break;
    }
    count(&insn);
    g[REG_RIP] += insn.length;
    done = 1;
  }
  if (!done) sigaction(SIGILL, &previous, NULL);
}

/* Whether the process may use tile data already; then nothing would trap. */
static int has_permission(void) {
  enum { kArchGetXcompPerm = 0x1022, kTileDataBit = 18 };
  uint64_t permitted = 0;
  if (syscall(SYS_arch_prctl, kArchGetXcompPerm, &permitted) != 0) return 0;
  return (int)(permitted >> kTileDataBit & 1);
}

/* Returns 0 once AMX instructions trap, 1 where they run natively and nothing was installed,
 * -1 on an error. */
int amx_trap_install(void) {
  unsigned a, b, c, d;
  cpu_has_amx = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1);
  if (cpu_has_amx) {
    if (has_permission()) return 1;
    if (!__get_cpuid_count(0xd, 17, &a, &b, &c, &d)) return -1;
    config_offset = b;
  }
  if (installed) return 0;
  struct sigaction action = {.sa_sigaction = on_sigill, .sa_flags = SA_SIGINFO | SA_NODEFER};
  if (sigaction(SIGILL, &action, &previous) != 0) return -1;
  installed = 1;
  return 0;
}

/* How often each instruction was done in software, in the order of amx_op. */
void amx_trap_counts(uint64_t* out) {
  for (int i = 0; i < kAmxOps; ++i) out[i] = __atomic_load_n(&counts[i], __ATOMIC_RELAXED);
}

/* Of each tile: loads, stores and products so far. */
void amx_trap_tile_counts(uint64_t out[3][kTiles]) {
  for (int i = 0; i < kTiles; ++i) {
    out[0][i] = __atomic_load_n(&tile_loads[i], __ATOMIC_RELAXED);
    out[1][i] = __atomic_load_n(&tile_stores[i], __ATOMIC_RELAXED);
    out[2][i] = __atomic_load_n(&tile_products[i], __ATOMIC_RELAXED);
  }
}
