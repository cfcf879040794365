/* The instructions of AMX-TILE, AMX-INT8 and AMX-BF16 on a software tile file.
 *
 * Semantics, and the checks that make an instruction fault, follow the instruction pages of the
 * Intel SDM. Compile without contraction: tdpbf16ps says where it fuses and where it rounds.
 */
#include "amx_soft.h"

#include <string.h>
#include <xmmintrin.h>

static uint16_t read_u16(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

const char* amx_load_config(amx_tiles* tiles, const uint8_t* config) {
  enum { kColsb = 16, kRows = 48 };
  if (config[0] == 0) {
    memset(tiles, 0, sizeof *tiles);
    return NULL;
  }
  if (config[0] != 1) return "ldtilecfg: palette is neither 0 nor 1";
  for (int i = 2; i < kConfigBytes; ++i) {
    const int known =
        (i >= kColsb && i < kColsb + 2 * kTiles) || (i >= kRows && i < kRows + kTiles);
    if (!known && config[i]) return "ldtilecfg: a reserved byte is not zero";
  }
  for (int i = 0; i < kTiles; ++i) {
    const int colsb = read_u16(config + kColsb + 2 * i), rows = config[kRows + i];
    if (colsb > kTileBytes || rows > kTileRows) return "ldtilecfg: a tile is too large";
    if ((colsb == 0) != (rows == 0)) return "ldtilecfg: a tile has rows or columns, but not both";
  }
  memset(tiles, 0, sizeof *tiles);
  tiles->palette = 1;
  tiles->start_row = config[1];
  for (int i = 0; i < kTiles; ++i) {
    tiles->colsb[i] = read_u16(config + kColsb + 2 * i);
    tiles->rows[i] = config[kRows + i];
  }
  return NULL;
}

void amx_store_config(const amx_tiles* tiles, uint8_t* config) {
  memset(config, 0, kConfigBytes);
  if (!tiles->palette) return;
  config[0] = 1;
  config[1] = tiles->start_row;
  for (int i = 0; i < kTiles; ++i) {
    config[16 + 2 * i] = (uint8_t)tiles->colsb[i];
    config[48 + i] = tiles->rows[i];
  }
}

/* VEX.128.0F38.W0 with opcode 49, 4B, 5C or 5E; the mandatory prefix picks the instruction. */
int amx_decode(const uint8_t* ip, const uint64_t* regs, uint64_t fs_base, amx_insn* insn) {
  enum { kNone, k66, kF3, kF2 };
  const int fs = ip[0] == 0x64;
  const uint8_t* vex = ip + fs;
  if (vex[0] != 0xc4 || (vex[1] & 0x1f) != 2 || (vex[2] & 0x84) != 0) return 0;
  const int prefix = vex[2] & 3, vvvv = ~vex[2] >> 3 & 15;
  const int opcode = vex[3], modrm = vex[4];
  const int r = vex[1] & 0x80 ? 0 : 8, x = vex[1] & 0x40 ? 0 : 8, b = vex[1] & 0x20 ? 0 : 8;
  const int mod = modrm >> 6, reg = (modrm >> 3 & 7) | r, rm = modrm & 7;

  *insn = (amx_insn){.op = kAmxOps, .dst = reg, .a = rm | b, .b = vvvv};
  const uint8_t* end = vex + 5;
  uint64_t index_value = 0;
  int has_sib = 0;
  if (mod != 3) {
    int base = rm | b, relative = 0, absolute = 0;
    int32_t displacement = 0;
    if (rm == 4) {
      const int sib = *end++, index = (sib >> 3 & 7) | x;
      has_sib = 1;
      base = (sib & 7) | b;
      if (index != 4) index_value = regs[index] << (sib >> 6);
      absolute = mod == 0 && (sib & 7) == 5;
    } else {
      relative = mod == 0 && rm == 5;
    }
    if (mod == 1) {
      displacement = (int8_t)*end++;
    } else if (mod == 2 || relative || absolute) {
      memcpy(&displacement, end, sizeof displacement);
      end += sizeof displacement;
    }
    insn->address = (uint64_t)(int64_t)displacement + (fs ? fs_base : 0);
    if (relative) insn->address += (uint64_t)(uintptr_t)end;
    if (!relative && !absolute) insn->address += regs[base];
  }
  insn->length = (int)(end - ip);

  switch (opcode) {
    case 0x49:
      if (vvvv != 0) return 0;
      if (mod != 3 && reg == 0) {
        /* A plain memory operand: an index register is part of the address, not a stride. */
        insn->address += index_value;
        insn->op = prefix == kNone ? kLdtilecfg : prefix == k66 ? kSttilecfg : kAmxOps;
      } else if (modrm == 0xc0 && prefix == kNone) {
        insn->op = kTilerelease;
      } else if (mod == 3 && rm == 0 && prefix == kF2) {
        insn->op = kTilezero;
      }
      break;
    case 0x4b:
      if (vvvv != 0 || !has_sib) return 0;
      insn->stride = index_value;
      insn->op = prefix == kF2   ? kTileloadd
                 : prefix == k66 ? kTileloaddt1
                 : prefix == kF3 ? kTilestored
                                 : kAmxOps;
      break;
    case 0x5c:
      if (mod == 3 && prefix == kF3) insn->op = kTdpbf16ps;
      break;
    case 0x5e: {
      static const amx_op kByPrefix[] = {
          [kNone] = kTdpbuud, [k66] = kTdpbusd, [kF3] = kTdpbsud, [kF2] = kTdpbssd};
      if (mod == 3) insn->op = kByPrefix[prefix];
      break;
    }
    default:
      break;
  }
  return insn->op != kAmxOps;
}

/* Byte `i` of a word, extended as the instruction reads it. Arithmetic is modulo 2^32. */
static uint32_t extend(uint32_t word, int i, int is_signed) {
  const uint32_t byte = word >> 8 * i & 255;
  return is_signed ? (byte ^ 128) - 128 : byte;
}

static void dot_int8(amx_tiles* t, const amx_insn* in, int a_signed, int b_signed) {
  const int columns = t->colsb[in->dst] / 4;
  for (int k = 0; k < t->rows[in->b]; ++k) {
    uint32_t b[4][16], weight[16];
    memcpy(weight, t->tile[in->b][k], sizeof weight);
    for (int i = 0; i < 4; ++i) {
      for (int n = 0; n < 16; ++n) b[i][n] = extend(weight[n], i, b_signed);
    }
    for (int m = 0; m < t->rows[in->dst]; ++m) {
      uint32_t a, sum[16];
      memcpy(&a, t->tile[in->a][m] + 4 * k, sizeof a);
      memcpy(sum, t->tile[in->dst][m], sizeof sum);
      for (int i = 0; i < 4; ++i) {
        const uint32_t value = extend(a, i, a_signed);
        for (int n = 0; n < 16; ++n) sum[n] += value * b[i][n];
      }
      memcpy(t->tile[in->dst][m], sum, 4 * (size_t)columns);
    }
  }
}

static float bf16_half(uint32_t word, int odd) {
  const uint32_t bits = odd ? word & 0xffff0000u : word << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Even and odd depths are two chains of fused multiply-adds from zero; their sum is added to the
 * destination. Always to nearest even, with subnormals read and written as zero. */
static void dot_bf16(amx_tiles* t, const amx_insn* in) {
  const int columns = t->colsb[in->dst] / 4;
  const unsigned caller_mxcsr = _mm_getcsr();
  _mm_setcsr(0x9fc0);
  __asm__ volatile("" ::: "memory");
  for (int m = 0; m < t->rows[in->dst]; ++m) {
    float chain[2][16] = {{0}}, out[16];
    for (int k = 0; k < t->rows[in->b]; ++k) {
      uint32_t a, b[16];
      memcpy(&a, t->tile[in->a][m] + 4 * k, sizeof a);
      memcpy(b, t->tile[in->b][k], sizeof b);
      for (int odd = 0; odd < 2; ++odd) {
        for (int n = 0; n < 16; ++n) {
          chain[odd][n] = __builtin_fmaf(bf16_half(a, odd), bf16_half(b[n], odd), chain[odd][n]);
        }
      }
    }
    memcpy(out, t->tile[in->dst][m], sizeof out);
    for (int n = 0; n < 16; ++n) out[n] += chain[0][n] + chain[1][n];
    memcpy(t->tile[in->dst][m], out, 4 * (size_t)columns);
  }
  __asm__ volatile("" ::: "memory");
  _mm_setcsr(caller_mxcsr);
}

static const char* check_tile(const amx_tiles* t, int tile) {
  if (!t->palette) return "no tile configuration is loaded in this thread";
  if (tile >= kTiles || t->rows[tile] == 0) return "the tile is not part of the configuration";
  if (t->colsb[tile] % 4 != 0) return "the row of the tile is no multiple of 4 bytes";
  return NULL;
}

static const char* transfer(amx_tiles* t, const amx_insn* in) {
  const char* fault = check_tile(t, in->dst);
  if (fault) return fault;
  if (t->start_row >= t->rows[in->dst]) return "start_row is behind the last row of the tile";
  if (in->op != kTilestored && t->start_row == 0) memset(t->tile[in->dst], 0, sizeof *t->tile);
  for (int row = t->start_row; row < t->rows[in->dst]; ++row) {
    uint8_t* memory = (uint8_t*)(uintptr_t)(in->address + (uint64_t)row * in->stride);
    if (in->op == kTilestored) {
      memcpy(memory, t->tile[in->dst][row], t->colsb[in->dst]);
    } else {
      memcpy(t->tile[in->dst][row], memory, t->colsb[in->dst]);
    }
  }
  t->start_row = 0;
  return NULL;
}

static const char* multiply(amx_tiles* t, const amx_insn* in) {
  if (in->dst == in->a || in->dst == in->b || in->a == in->b) return "a tile is used twice";
  const int used[] = {in->dst, in->a, in->b};
  for (int i = 0; i < 3; ++i) {
    const char* fault = check_tile(t, used[i]);
    if (fault) return fault;
  }
  if (t->rows[in->dst] != t->rows[in->a] || t->colsb[in->dst] != t->colsb[in->b] ||
      t->colsb[in->a] != 4 * t->rows[in->b]) {
    return "the shapes of the tiles do not fit each other";
  }
  switch (in->op) {
    case kTdpbssd:
      dot_int8(t, in, 1, 1);
      break;
    case kTdpbsud:
      dot_int8(t, in, 1, 0);
      break;
    case kTdpbusd:
      dot_int8(t, in, 0, 1);
      break;
    case kTdpbuud:
      dot_int8(t, in, 0, 0);
      break;
    default:
      dot_bf16(t, in);
      break;
  }
  t->start_row = 0;
  return NULL;
}

const char* amx_execute(amx_tiles* t, const amx_insn* in) {
  switch (in->op) {
    case kLdtilecfg:
      return amx_load_config(t, (const uint8_t*)(uintptr_t)in->address);
    case kSttilecfg:
      amx_store_config(t, (uint8_t*)(uintptr_t)in->address);
      return NULL;
    case kTilerelease:
      memset(t, 0, sizeof *t);
      return NULL;
    case kTilezero: {
      const char* fault = check_tile(t, in->dst);
      if (fault) return fault;
      memset(t->tile[in->dst], 0, sizeof *t->tile);
      t->start_row = 0;
      return NULL;
    }
    case kTileloadd:
    case kTileloaddt1:
    case kTilestored:
      return transfer(t, in);
    default:
      return multiply(t, in);
  }
}
