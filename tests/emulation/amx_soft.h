/* amx_soft.h - Intel AMX in software, for tests on machines that must not or cannot run it.
 *
 * The core (amx_soft.c) decodes and executes one AMX instruction on a software tile file. The trap
 * (amx_trap.c) drives it from SIGILL, so that unchanged machine code runs without AMX.
 */
#ifndef AMX_SOFT_H_
#define AMX_SOFT_H_

#include <stdint.h>

enum { kTiles = 8, kTileRows = 16, kTileBytes = 64, kConfigBytes = 64 };

typedef enum {
  kLdtilecfg,
  kSttilecfg,
  kTilerelease,
  kTilezero,
  kTileloadd,
  kTileloaddt1,
  kTilestored,
  kTdpbssd,
  kTdpbsud,
  kTdpbusd,
  kTdpbuud,
  kTdpbf16ps,
  kAmxOps
} amx_op;

/* What tilerelease leaves behind is all zero. */
typedef struct {
  uint8_t tile[kTiles][kTileRows][kTileBytes];
  uint16_t colsb[kTiles];
  uint8_t rows[kTiles];
  uint8_t palette, start_row;
} amx_tiles;

/* One decoded instruction. `dst`, `a`, `b` are tiles; `address` and `stride` are of its memory. */
typedef struct {
  amx_op op;
  int length;
  int dst, a, b;
  uint64_t address, stride;
} amx_insn;

/* Decodes the instruction at `ip`, with the general registers rax rcx rdx rbx rsp rbp rsi rdi
 * r8..r15. Returns 1, or 0 if this is no AMX instruction that we know. */
int amx_decode(const uint8_t* ip, const uint64_t* regs, uint64_t fs_base, amx_insn* insn);

/* Executes it. Returns NULL, or the reason for which the hardware would fault. */
const char* amx_execute(amx_tiles* tiles, const amx_insn* insn);

/* Takes over a configuration in the memory format of ldtilecfg; NULL or the reason to fault. */
const char* amx_load_config(amx_tiles* tiles, const uint8_t* config);
void amx_store_config(const amx_tiles* tiles, uint8_t* config);

#endif /* AMX_SOFT_H_ */
