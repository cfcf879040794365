// Weights as operands in memory, where AMX wants them.
#pragma once

#include "llamafile/codes.h"
#include "llamafile/scaling.h"

namespace ktk::llamafile {
namespace {

constexpr size_t kOperandBytes = kSteps * kPlaneBytes;  // of a unit: a row for every step

template <size_t kStep = 0, class AnyCodes>
inline void write_steps(const AnyCodes& codes, const uint8_t* unit, uint8_t* to) {
  Dot::store_bytes(to + kStep * kPlaneBytes, codes.template operand<kStep>(unit));
  if constexpr (kStep + 1 < kSteps) write_steps<kStep + 1>(codes, unit, to);
}

// Makes operands of the codes of some units.
template <int kBits, int kOffset>
void write_operands(const CodeTable& table, const uint8_t* unit, size_t units, uint8_t* to) {
  const Codes<kBits, kOffset> codes(table);
  for (; units > 0; --units, unit += kBits * kPlaneBytes, to += kOperandBytes) {
    for (size_t at = 0; at < kPlaneBytes; at += sizeof(Dot::Int)) {
      write_steps(codes, unit + at, to + at);
    }
  }
}

using WriteOperands = void (*)(const CodeTable&, const uint8_t*, size_t, uint8_t*);

// Bytes of scratch: operands and parameters of a stretch of so many units.
constexpr size_t stretch_bytes(size_t units) {
  return units * (kOperandBytes + kMaxParams * sizeof(float));
}

// Operands of so many units from `run` on: whole runs, and the last one of a block.
inline void write_stretch(const BlockLayout& layout, const CodeTable& table, WriteOperands write,
                          const uint8_t* run, size_t units, uint8_t* to) {
  for (size_t count; units > 0; units -= count, to += count * kOperandBytes) {
    count = smaller(kSubBlocks, units);
    const size_t at = layout.header_of(count).end;
    write(table, run + at, count, to);
    run += at + count * sub_block_bytes(layout.type);
  }
}

}  // namespace
}  // namespace ktk::llamafile
