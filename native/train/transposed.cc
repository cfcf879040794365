#include "train/transposed.h"

#include <algorithm>
#include <stdexcept>

#include "core/prefetch.h"
#include "core/size.h"
#include "format/format.h"
#include "ops/select.h"

namespace ktk {
namespace {

// Deep enough that adding up the sums of blocks costs little. A block of 2048 columns leaves L2
// between unpacking and packing, which costs less than the additions of twice as many blocks.
constexpr size_t kDepth = 512;
// Rows that are unpacked before they are transposed.
constexpr size_t kUnpacked = 32;

constexpr ktk_format plain(ktk_element element) { return {element, KTK_NONE, KTK_NONE, 0, 0}; }

ktk_format format_for(const BackendTable& table) {
  for (const ktk_element element : {KTK_BF16, KTK_F32}) {
    for (const ktk_format& format : table.formats) {
      if (format.element == element) return plain(element);
    }
  }
  throw std::invalid_argument(table.name +
                              " stores no floats, which gradients are multiplied with");
}

}  // namespace

FloatBackend::FloatBackend(std::shared_ptr<const BackendTable> table_)
    : table(std::move(table_)),
      variant(table->select("")),
      given(format_for(*table)),
      stored(table->stored(given, nullptr, 1, 1)) {}

Transposing::Transposing(const Variant& stored, const FloatBackend& floats, size_t columns)
    : stored_(stored), floats_(floats) {
  const ktk_tile& tile = floats.variant.tile;
  const size_t step =
      common_multiple(common_multiple(tile.n_step, tile.k_step), stored.tile.n_step);
  depth_ = round_up(kDepth, step);
  unpacked_rows_ = round_up(kUnpacked, stored.tile.n_step);
  own_unpacked_ = own_.add(unpacked_rows_, product(odd_stride(columns), sizeof(float)));
  own_turned_ = own_.add(columns, product(odd_stride(depth_), sizeof(float)));
}

size_t Transposing::pad(size_t rows) const { return round_up(rows, floats_.variant.tile.m_step); }

TransposedBlock Transposing::block(const ktk_matrix& source, size_t index) const {
  TransposedBlock block;
  block.source = &source;
  block.begin = index * depth_;
  block.end = std::min(block.begin + depth_, source.n);
  block.matrix = {source.k, block.end - block.begin, floats_.stored};
  block.act_bytes = floats_.variant.act_bytes(block.matrix);
  block.bytes = floats_.variant.weight_bytes(block.matrix);
  return block;
}

void Transposing::add(const ktk_matrix& source, const char* packed, float factor, Carver& memory,
                      std::vector<TransposedBlock>& blocks) const {
  for (size_t i = 0; i < count(source.n); ++i) {
    TransposedBlock one = block(source, i);
    one.packed = packed;
    one.factor = factor;
    one.at = memory.add(one.bytes);
    blocks.push_back(one);
  }
}

void Transposing::pack(const TransposedBlock& block, char* memory, char* own) const {
  const size_t columns = block.source->k, rows = block.end - block.begin;
  const size_t stride = odd_stride(columns), turned_stride = odd_stride(depth_);
  float* const unpacked = reinterpret_cast<float*>(own + own_unpacked_);
  char* const turned = own + own_turned_;
  const size_t item = floats_.given.element == KTK_F32 ? sizeof(float) : sizeof(uint16_t);
  for (size_t done = 0; done < rows; done += unpacked_rows_) {
    const size_t count = std::min(rows - done, unpacked_rows_), first = block.begin + done;
    stored_.unpack_weight(block.source, block.packed, first, first + count, unpacked, stride);
    if (block.factor != 1) ops().scale(block.factor, count, columns, unpacked, stride);
    products().transpose(count, columns, unpacked, stride, floats_.given.element,
                         turned + done * item, turned_stride);
  }
  ktk_source source{};
  source.format = floats_.given;
  source.data = turned;
  source.data_stride = turned_stride * item;
  floats_.variant.pack_weight(&block.matrix, &source, 0, block.matrix.n, memory + block.at);
}

void Transposing::multiply(const TransposedBlock& block, const char* memory, size_t m,
                           const char* act, size_t n_begin, size_t n_end, float* dst,
                           size_t dst_stride, char* scratch) const {
  ktk_matmul mm{};
  mm.struct_size = sizeof mm;
  mm.matrix = &block.matrix;
  mm.weight = memory + block.at;
  mm.n_begin = n_begin;
  mm.n_end = n_end;
  mm.m = m;
  mm.act = act;
  mm.act_stride = block.act_bytes;
  mm.dst = dst;
  mm.dst_stride = dst_stride;
  mm.scratch = scratch;
  mm.prefetch = &prefetch();
  floats_.variant.kernel_for(m).run(&mm);
}

size_t Transposing::scratch_bytes(const std::vector<TransposedBlock>& blocks, size_t m) const {
  size_t bytes = 0;
  for (const ktk_ukernel& kernel : floats_.variant.kernels) {
    for (const TransposedBlock& block : blocks) {
      bytes = std::max(bytes, floats_.variant.scratch_bytes(kernel, block.matrix, m));
    }
  }
  return bytes;
}

}  // namespace ktk
