#include "train/transposed.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "core/memory.h"
#include "core/prefetch.h"
#include "core/size.h"
#include "ops/select.h"

namespace ktk {
namespace {

constexpr ktk_format kStored = {KTK_BF16, KTK_NONE, KTK_NONE, 0, 0};

// Packs numbers of which no two are equal, in both ways.
bool packs_pairs(const Variant& variant) {
  constexpr size_t kColumns = 40, kDepth = 70;
  const ktk_matrix matrix = {kColumns, kDepth, kStored};
  std::vector<uint16_t> values(kColumns * kDepth);
  std::vector<float> turned(values.size());
  for (size_t n = 0; n < kColumns; ++n) {
    for (size_t k = 0; k < kDepth; ++k) {
      const size_t at = n * kDepth + k;
      values[at] = static_cast<uint16_t>(0x3000 + at);
      ops().to_f32(&values[at], KTK_BF16, 1, &turned[k * kColumns + n]);
    }
  }
  const size_t blocks = groups_of(kColumns, KTK_PAIR_COLUMNS);
  const size_t block_bytes = groups_of(kDepth, KTK_PAIR_DEPTH) * KTK_PAIR_STEP_BYTES;
  const size_t bytes = variant.weight_bytes(matrix);
  if (KTK_PAIR_DEPTH % variant.tile.k_step || bytes != blocks * block_bytes) return false;
  Memory expected(bytes), found(bytes);
  ktk_source source{};
  source.format = kStored;
  source.data = values.data();
  source.data_stride = kDepth * sizeof values[0];
  variant.pack(matrix, source, 0, kColumns, expected.data(), bytes);
  products().pack_pairs(kDepth, kColumns, turned.data(), kColumns, found.data(), block_bytes);
  return std::memcmp(expected.data(), found.data(), bytes) == 0;
}

// Bytes of an element of encoded rows, if they are nothing but elements behind each other: a part
// of a row is then a row, too.
size_t element_of_rows(const Variant& variant) {
  constexpr size_t kDepth = 70;
  const ktk_matrix matrix = {KTK_PAIR_COLUMNS, kDepth, kStored};
  const ktk_element element = variant.act_of(matrix).element;
  if (element != KTK_BF16 && element != KTK_F32) return 0;
  std::vector<float> row(kDepth);
  for (size_t k = 0; k < kDepth; ++k) row[k] = static_cast<float>(k + 1);  // exact in bf16
  const size_t rows = variant.tile.m_step, bytes = variant.act_bytes(matrix);
  Memory encoded(product(rows, bytes));
  variant.pack_act(&matrix, 1, 0, kDepth, row.data(), kDepth, encoded.data(), bytes);
  std::vector<float> found(kDepth);
  const size_t size = element == KTK_F32 ? sizeof(float) : sizeof(uint16_t);
  if (bytes < kDepth * size) return 0;
  ops().to_f32(encoded.data(), element, kDepth, found.data());
  return found == row ? size : 0;
}

}  // namespace

FloatBackend::FloatBackend(std::shared_ptr<const BackendTable> table_)
    : table(std::move(table_)),
      variant(table->select("")),
      stored(kStored),
      act_element(element_of_rows(variant)) {
  const bool has_bf16 =
      std::any_of(table->formats.begin(), table->formats.end(),
                  [](const ktk_format& format) { return format.element == KTK_BF16; });
  if (!has_bf16 || !packs_pairs(variant)) {
    throw std::invalid_argument(
        table->name + " does not store bf16 weights in pairs of depth, which gradients want");
  }
  if (act_element == 0) {
    throw std::invalid_argument(table->name +
                                " does not encode activations as plain rows, which gradients want");
  }
}

Transposing::Transposing(const Variant& stored, const FloatBackend& floats, size_t columns)
    : stored_(stored),
      floats_(floats),
      rows_(pad_depth(stored.tile.n_step)),
      stride_(odd_stride(columns)),
      own_unpacked_(own_.add(rows_, product(stride_, sizeof(float)))) {}

TransposedMatrix Transposing::matrix(size_t columns, size_t depth) const {
  TransposedMatrix one;
  one.matrix = {columns, depth, floats_.stored};
  one.act_bytes = variant().act_bytes(one.matrix);
  one.bytes = variant().weight_bytes(one.matrix);
  return one;
}

void Transposing::pack(const WeightRows& rows, const TransposedMatrix& to, size_t at, char* memory,
                       char* own) const {
  const size_t columns = rows.source->k;
  const bool as_stored = rows.factor == 1 && !rows.order;
  if (&stored_ == &floats_.variant && as_stored) return turn(rows, to, at, memory);
  float* const unpacked = buffer(own);
  for (size_t begin = rows.begin; begin < rows.end; begin += rows_, at += rows_) {
    const size_t count = std::min(rows.end - begin, rows_);
    stored_.unpack_weight(rows.source, rows.packed, begin, begin + count, unpacked, stride_);
    if (rows.factor != 1) ops().scale(rows.factor, count, columns, unpacked, stride_);
    restore_columns(rows.order, count, unpacked, stride_);
    pack(unpacked, stride_, count, to, at, memory);
  }
}

void Transposing::turn(const WeightRows& rows, const TransposedMatrix& to, size_t at,
                       char* memory) {
  const size_t steps = groups_of(rows.source->k, KTK_PAIR_DEPTH);
  const size_t to_steps = groups_of(to.matrix.k, KTK_PAIR_DEPTH);
  for (size_t begin = rows.begin; begin < rows.end; begin += KTK_PAIR_COLUMNS) {
    const size_t block = begin / KTK_PAIR_COLUMNS;
    const size_t step = (at + begin - rows.begin) / KTK_PAIR_DEPTH;
    products().turn_pairs(rows.packed + block * steps * KTK_PAIR_STEP_BYTES, steps,
                          memory + step * KTK_PAIR_STEP_BYTES, to_steps * KTK_PAIR_STEP_BYTES);
  }
}

void Transposing::pack(const float* rows, size_t stride, size_t count, const TransposedMatrix& to,
                       size_t at, char* memory) {
  const size_t steps = groups_of(to.matrix.k, KTK_PAIR_DEPTH);
  products().pack_pairs(count, to.matrix.n, rows, stride,
                        memory + at / KTK_PAIR_DEPTH * KTK_PAIR_STEP_BYTES,
                        steps * KTK_PAIR_STEP_BYTES);
}

void Transposing::multiply_part(const TransposedMatrix& matrix, const char* memory, size_t m,
                                const char* act, size_t act_bytes, size_t depth, size_t begin,
                                size_t end, float* dst, size_t dst_stride, char* scratch) const {
  ktk_matmul mm{};
  mm.struct_size = sizeof mm;
  mm.matrix = &matrix.matrix;
  mm.weight = memory;
  mm.n_begin = begin;
  mm.n_end = end;
  mm.m = m;
  mm.act = act + depth * floats_.act_element;
  mm.act_stride = act_bytes;
  mm.dst = dst;
  mm.dst_stride = dst_stride;
  mm.scratch = scratch;
  mm.prefetch = &prefetch();
  variant().kernel_for(m).run(&mm);
}

size_t Transposing::scratch_bytes(const TransposedMatrix& matrix, size_t m) const {
  size_t bytes = 0;
  for (const ktk_ukernel& kernel : variant().kernels) {
    bytes = std::max(bytes, variant().scratch_bytes(kernel, matrix.matrix, m));
  }
  return bytes;
}

}  // namespace ktk
