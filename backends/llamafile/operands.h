// Weights as operands in memory, where AMX wants them.
#pragma once

#include "llamafile/codes.h"
#include "llamafile/params.h"

namespace ktk::llamafile {
namespace {

constexpr size_t kOperandBytes = kUnitSteps * kRowBytes;  // of a unit: a row for every step

template <size_t kStep = 0, class AnyCodes>
inline void write_steps(const AnyCodes& codes, const uint8_t* unit, uint8_t* to) {
  Dot::store_bytes(to + kStep * kRowBytes, codes.template operand<kStep>(unit));
  if constexpr (kStep + 1 < kUnitSteps) write_steps<kStep + 1>(codes, unit, to);
}

// Makes operands of the codes of some units.
template <int kBits, int kOffset>
void write_operands(const Meaning& meaning, const uint8_t* unit, size_t units, uint8_t* to) {
  const Codes<kBits, kOffset> codes(meaning);
  for (; units > 0; --units, unit += kBits * kRowBytes, to += kOperandBytes) {
    for (size_t at = 0; at < kRowBytes; at += sizeof(Dot::Int)) {
      write_steps(codes, unit + at, to + at);
    }
  }
}

using WriteOperands = void (*)(const Meaning&, const uint8_t*, size_t, uint8_t*);

// Bytes of scratch: operands and parameters of a stretch of so many units.
constexpr size_t stretch_bytes(size_t units) {
  return units * (kOperandBytes + kMaxParams * sizeof(float));
}

// Operands of so many units from `run` on: whole runs, and the last one of a block.
inline void write_stretch(const Runs& runs, const Meaning& meaning, WriteOperands write,
                          const uint8_t* run, size_t units, uint8_t* to) {
  for (size_t count; units > 0; units -= count, to += count * kOperandBytes) {
    count = smaller(kRunUnits, units);
    const size_t at = runs.of(count).end;
    write(meaning, run + at, count, to);
    run += at + count * unit_bytes(runs.type);
  }
}

}  // namespace
}  // namespace ktk::llamafile
