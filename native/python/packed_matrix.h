// One packed matrix: the conformance kit, benchmarks and debuggers look at codecs and micro-kernels
// through it, without the pipeline.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/guarded.h"
#include "core/prefetch.h"
#include "core/registers.h"
#include "core/size.h"
#include "format/elements.h"
#include "format/format.h"
#include "moe/table.h"
#include "python/arguments.h"
#include "python/gil.h"
#include "python/lent.h"
#include "python/rows.h"
#include "python/source.h"
#include "python/spaced_rows.h"

namespace ktk {

class PackedMatrix {
 public:
  PackedMatrix(std::shared_ptr<BackendTable> table, const std::string& variant,
               const AnyArray& data, const std::optional<AnyArray>& scale,
               const std::optional<AnyArray>& zero, const std::optional<ktk_format>& given,
               const std::optional<ktk_format>& stored, bool force, const std::string& guard,
               bool size_only = false)
      : table_(std::move(table)), variant_(table_->select(variant, force)), lender_(guard) {
    const ktk_source source = source_from("weight", data, scale, zero, given, -1, -1);
    const size_t n = data.shape(0);
    const Block block = block_of(source.format.element);
    const size_t k = product(data.shape(1), data.itemsize()) / block.bytes * block.columns;
    if (n == 0 || k == 0) throw nb::value_error("weight is empty");
    matrix_ =
        table_->matrix(table_->stored(source.format, stored ? &*stored : nullptr, n, k), n, k);
    act_size_ = variant_.act_bytes(matrix_);
    std::vector<Guarded> keep;
    const ktk_source guarded = lent(source, keep);
    const Unlocked unlocked;
    bytes_ = variant_.weight_bytes(matrix_, source_bytes(guarded, 0, n));
    if (size_only) return;
    packed_.emplace(lender_.lend(Operand::kWeight, nullptr, bytes_, KTK_ALIGNMENT));
    pack(guarded, 0, n);
  }

  // Of packed bytes, such as a file keeps.
  PackedMatrix(std::shared_ptr<BackendTable> table, const std::string& variant,
               const ByteInput& packed, const ktk_format& stored, size_t n, size_t k, bool force,
               const std::string& guard)
      : table_(std::move(table)),
        variant_(table_->select(variant, force)),
        matrix_(table_->matrix(stored, n, k)),
        act_size_(variant_.act_bytes(matrix_)),
        lender_(guard) {
    if (!variant_.is_packed) {
      throw nb::value_error((variant_.where + " cannot check packed bytes").c_str());
    }
    bytes_ = product(packed.shape(0), packed.shape(1));
    packed_.emplace(lender_.lend(Operand::kWeight, packed.data(), bytes_, KTK_ALIGNMENT));
    const Unlocked unlocked;
    if (!variant_.is_packed(&matrix_, packed_->data(), bytes_)) {
      throw std::invalid_argument("these " + std::to_string(bytes_) + " bytes are no weight [" +
                                  std::to_string(n) + ", " + std::to_string(k) +
                                  "] in the layout " + variant_.layout);
    }
  }

  size_t n() const { return matrix_.n; }
  size_t k() const { return matrix_.k; }
  size_t nbytes() const { return bytes_; }
  const ktk_format& format() const { return matrix_.format; }
  const char* variant() const { return variant_.name; }

  nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> buffer(nb::handle self) {
    return {reinterpret_cast<uint8_t*>(packed_->data()), {bytes_}, self};
  }

  void repack(nb::handle data_, nb::handle scale_, nb::handle zero_,
              const std::optional<ktk_format>& given, size_t n_begin, size_t n_end) {
    check_columns(n_begin, n_end);
    const AnyArray data = input_from("weight", data_);
    const std::optional<AnyArray> scale = optional_input_from("weight_scale", scale_);
    const std::optional<AnyArray> zero = optional_input_from("weight_zero", zero_);
    const ktk_source source = source_from("weight", data, scale, zero, given,
                                          static_cast<int64_t>(n()), static_cast<int64_t>(k()));
    table_->stored(source.format, &matrix_.format, n(), k());
    std::vector<Guarded> keep;
    const ktk_source guarded = lent(source, keep);
    const size_t needed = source_bytes(guarded, n_begin, n_end);
    if (needed > bytes_) {
      throw nb::value_error((variant_.where + ": these rows take " + std::to_string(needed) +
                             " bytes, the matrix has " + std::to_string(bytes_))
                                .c_str());
    }
    pack(guarded, n_begin, n_end);
  }

  F32Matrix unpack(size_t n_begin, std::optional<size_t> n_end) const {
    const size_t end = n_end.value_or(n());
    if (n_begin >= end || end > n()) throw nb::value_error("there are no such rows");
    return rows_from("unpack_weight", "weight", end - n_begin, [&](float* out, size_t stride) {
      variant_.unpack_weight(&matrix_, packed_->data(), n_begin, end, out, stride);
    });
  }

  // Data, scales and zero points as bytes: numpy has no bf16, and the format says what they are.
  // Written range by range of `cuts`, 0 and n() among them, to rows that are `apart` bytes longer;
  // without cuts, at once.
  nb::tuple exported(std::vector<size_t> cuts, size_t apart) const {
    if (!variant_.export_weight) {
      throw nb::value_error((table_->name + " cannot export weights").c_str());
    }
    if (cuts.empty()) cuts = {0, n()};
    if (cuts.size() < 2 || cuts.front() != 0 || cuts.back() != n()) {
      throw nb::value_error("cuts begin with 0 and end with n");
    }
    const SourceShape shape = source_shape(matrix_.format, n(), k());
    // How many rows share a row of scales; 0 means all of them.
    const size_t shared = shape.scale_bytes ? matrix_.format.group_n : 1;
    const size_t group = shared ? shared : n();
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      check_columns(cuts[i], cuts[i + 1]);
      if (cuts[i] % group) throw nb::value_error("a cut goes through a group of rows");
    }
    auto data = new_bytes(n(), shape.data_bytes);
    auto scale = new_bytes(shape.groups_n, shape.scale_bytes);
    auto zero = new_bytes(shape.groups_n, shape.zero_bytes);
    const auto spaced = [&](const char* name, size_t count, size_t bytes) {
      return SpacedRows(lender_, name, count, bytes, apart, 1);
    };
    const SpacedRows of_data = spaced("data", n(), shape.data_bytes);
    const SpacedRows of_scale = spaced("scale", shape.groups_n, shape.scale_bytes);
    const SpacedRows of_zero = spaced("zero", shape.groups_n, shape.zero_bytes);
    const ktk_export target = {of_data.data(),   of_scale.data(),   of_zero.data(),
                               of_data.stride(), of_scale.stride(), of_zero.stride()};
    const auto take = [&](const SpacedRows& rows, size_t begin, size_t end, uint8_t* to) {
      rows.take(variant_.where + ": export_weight", begin, end, reinterpret_cast<char*>(to));
    };
    {
      const Unlocked unlocked;
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const size_t begin = cuts[i], end = cuts[i + 1];
        variant_.export_weight(&matrix_, packed_->data(), begin, end, &target);
        take(of_data, begin, end, data.data() + begin * shape.data_bytes);
        const size_t first = begin / group, last = groups_of(end, group);
        take(of_scale, first, last, scale.data() + first * shape.scale_bytes);
        take(of_zero, first, last, zero.data() + first * shape.zero_bytes);
      }
    }
    return nb::make_tuple(data, scale, zero);
  }

  ktk_format act() const { return variant_.act_of(matrix_); }
  size_t act_size() const { return act_size_; }
  size_t padded(size_t m) const { return round_up(m, variant_.tile.m_step); }

  nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>> pack_act(nb::handle x_) const {
    const F32Input x = f32_from(x_);
    auto act = new_bytes(padded(x.shape(0)), act_size());
    const Lent rows = acts(nullptr, x.shape(0));
    encode(x, 0, k(), rows);
    rows.copy_to(act.data());
    return act;
  }

  void pack_act_range(nb::handle x_, size_t k_begin, size_t k_end, nb::handle act_) const {
    const F32Input x = f32_from(x_);
    const ByteOutput act{"act", output_from("act", act_), true};
    const size_t step = variant_.tile.k_step;
    if (k_begin >= k_end || k_end > k() || k_begin % step || (k_end % step && k_end != k())) {
      throw nb::value_error("depth range is not made of whole steps");
    }
    check_act(act.shape(0), act.shape(1), x.shape(0));
    const Lent rows = acts(act.data(), x.shape(0));
    encode(x, k_begin, k_end, rows);
    rows.copy_to(act.data());
  }

  F32Matrix unpack_act(nb::handle act_, size_t m) const {
    const ByteInput act = act_from(act_);
    check_act(act.shape(0), act.shape(1), m);
    return decode(acts(act.data(), m), m);
  }

  F32Matrix act_round_trip(nb::handle x_) const {
    const F32Input x = f32_from(x_);
    const Lent rows = acts(nullptr, x.shape(0));
    encode(x, 0, k(), rows);
    return decode(rows, x.shape(0));
  }

  F32Matrix matmul(nb::handle x, size_t n_begin, std::optional<size_t> n_end,
                   std::optional<size_t> ukernel) const {
    return multiply(x, n_begin, n_end, ukernel, false);
  }

  void check_registers(nb::handle x, size_t n_begin, std::optional<size_t> n_end,
                       std::optional<size_t> ukernel) const {
    multiply(x, n_begin, n_end, ukernel, true);
  }

  void run_raw(nb::handle act_, size_t m, size_t n_begin, size_t n_end, nb::handle dst_,
               std::optional<size_t> ukernel) const {
    const ByteInput act = act_from(act_);
    const F32Output out{"dst", output_from("dst", dst_), false};
    check_columns(n_begin, n_end);
    check_act(act.shape(0), act.shape(1), m);
    const size_t columns = round_up(n_end - n_begin, variant_.tile.n_step);
    const size_t stride = row_stride(out.array);
    if (out.shape(0) < padded(m) || out.shape(1) < columns || stride % 16) {
      throw nb::value_error("dst is too small, or its rows are not a multiple of 16 floats apart");
    }
    const Lent rows = acts(act.data(), m);
    const Lent panel = dst(out.data(), m, n_end - n_begin, stride);
    run(rows, m, n_begin, n_end, panel, stride, ukernel, false);
    panel.copy_to(out.data());
    if (std::memcmp(rows.data(), act.data(), rows.size()) != 0) {
      throw std::runtime_error(variant_.where + ": run changed its activations");
    }
  }

 private:
  // `watched`: throws std::runtime_error where a function leaves registers changed that are ours.
  F32Matrix multiply(nb::handle x_, size_t n_begin, std::optional<size_t> n_end,
                     std::optional<size_t> ukernel, bool watched) const {
    const F32Input x = f32_from(x_);
    const size_t m = x.shape(0), end = n_end.value_or(n());
    check_columns(n_begin, end);
    const Lent rows = acts(nullptr, m);
    encode(x, 0, k(), rows);
    const size_t stride = round_up(round_up(end - n_begin, variant_.tile.n_step), 16);
    const Lent panel = dst(nullptr, m, end - n_begin, stride);
    run(rows, m, n_begin, end, panel, stride, ukernel, watched);
    F32Matrix out = new_matrix(m, end - n_begin);
    for (size_t row = 0; row < m; ++row) {
      std::copy_n(floats(panel) + row * stride, end - n_begin, out.data() + row * (end - n_begin));
    }
    return out;
  }

  Lent acts(const void* from, size_t m) const {
    return lender_.lend(Operand::kAct, from, product(padded(m), act_size()), KTK_ALIGNMENT);
  }
  // From the first column of the first row to the last column of the last row, whole steps. The
  // first column may be any that is cut at: no more than a float's alignment is promised. Between
  // guards it has more, so that a column too many is written to bytes that are looked at
  // afterwards, and does not end the process.
  Lent dst(const void* from, size_t m, size_t columns, size_t stride) const {
    const size_t width = round_up(columns, variant_.tile.n_step);
    const size_t floats = m == 0 ? 0 : product(padded(m) - 1, stride) + width;
    const size_t align = lender_.guards(Operand::kDst) ? KTK_ALIGNMENT : sizeof(float);
    return lender_.lend(Operand::kDst, from, product(floats, sizeof(float)), align);
  }
  static float* floats(const Lent& memory) { return reinterpret_cast<float*>(memory.data()); }

  void check(const Lent& memory, const char* function) const {
    memory.check(variant_.where + ": " + function);
  }
  ktk_source lent(ktk_source source, std::vector<Guarded>& keep) const {
    const SourceShape shape = source_shape(source.format, n(), k());
    const auto bytes = [](size_t rows, size_t stride, size_t row) {
      return product(rows - 1, stride) + row;
    };
    source.data =
        lender_.input(source.data, bytes(n(), source.data_stride, shape.data_bytes), keep);
    source.scale = lender_.input(
        source.scale, bytes(shape.groups_n, source.scale_stride, shape.scale_bytes), keep);
    source.zero = lender_.input(source.zero,
                                bytes(shape.groups_n, source.zero_stride, shape.zero_bytes), keep);
    return source;
  }

  // Asks for ranges as short as the core may choose them.
  size_t source_bytes(const ktk_source& source, size_t n_begin, size_t n_end) const {
    size_t most = 0;
    for (size_t begin = n_begin; begin < n_end;) {
      const size_t end = std::min<size_t>(begin + variant_.tile.n_step, n_end);
      most = std::max(most, variant_.source_bytes(matrix_, source, begin, end));
      begin = end;
    }
    return most;
  }

  void pack(const ktk_source& source, size_t n_begin, size_t n_end) {
    variant_.pack(matrix_, source, n_begin, n_end, packed_->data(), bytes_);
    check(*packed_, variant_.pack_sized ? "pack_sized" : "pack_weight");
  }

  void encode(const F32Input& x, size_t k_begin, size_t k_end, const Lent& act) const {
    check_depth(x);
    std::vector<Guarded> keep;
    const auto* values = static_cast<const float*>(
        lender_.input(x.data(), product(x.shape(0), k(), sizeof(float)), keep));
    variant_.pack_act(&matrix_, x.shape(0), k_begin, k_end, values + k_begin, k(), act.data(),
                      act_size());
    check(act, "pack_act");
  }

  F32Matrix decode(const Lent& act, size_t m) const {
    return rows_from("unpack_act", "act", m, [&](float* out, size_t stride) {
      variant_.unpack_act(&matrix_, m, act.data(), act_size(), out, stride);
    });
  }

  // What a function writes as rows of k() floats, which it is given farther apart than that.
  template <typename Write>
  F32Matrix rows_from(const char* function, const char* name, size_t count, Write write) const {
    F32Matrix out = new_matrix(count, k());
    if (count == 0) return out;
    constexpr size_t kApart = 3 * sizeof(float);
    const SpacedRows rows(lender_, name, count, product(k(), sizeof(float)), kApart, sizeof(float));
    write(reinterpret_cast<float*>(rows.data()), rows.stride() / sizeof(float));
    rows.take(variant_.where + ": " + function, 0, count, reinterpret_cast<char*>(out.data()));
    return out;
  }

  void check_columns(size_t n_begin, size_t n_end) const {
    const size_t step = variant_.tile.n_step;
    if (n_begin >= n_end || n_end > n() || n_begin % step || (n_end % step && n_end != n())) {
      throw nb::value_error("column range is not made of whole steps");
    }
  }
  void check_depth(const F32Input& x) const {
    if (x.shape(1) != k()) {
      throw nb::value_error(
          ("act has depth " + std::to_string(x.shape(1)) + ", the weight " + std::to_string(k()))
              .c_str());
    }
  }
  void check_act(size_t rows, size_t bytes, size_t m) const {
    if (rows < padded(m) || bytes != act_size()) {
      throw nb::value_error(("packed act must be [" + std::to_string(padded(m)) + ", " +
                             std::to_string(act_size()) + "] bytes")
                                .c_str());
    }
  }

  const ktk_ukernel& chosen(size_t ukernel, size_t m) const {
    if (ukernel >= variant_.kernels.size()) {
      throw nb::index_error((variant_.where + " has " + std::to_string(variant_.kernels.size()) +
                             " micro-kernels, none has the number " + std::to_string(ukernel))
                                .c_str());
    }
    const ktk_ukernel& kernel = variant_.kernels[ukernel];
    if (m > kernel.m_max) {
      throw nb::value_error((variant_.where + ": micro-kernel " + kernel.name + " takes at most " +
                             std::to_string(kernel.m_max) + " rows, got " + std::to_string(m))
                                .c_str());
    }
    return kernel;
  }

  void run(const Lent& act, size_t m, size_t n_begin, size_t n_end, const Lent& panel,
           size_t stride, std::optional<size_t> ukernel, bool watched) const {
    if (m == 0) return;
    const ktk_ukernel& kernel = ukernel ? chosen(*ukernel, m) : variant_.kernel_for(m);
    const Lent scratch = lender_.lend(Operand::kScratch, nullptr,
                                      variant_.scratch_bytes(kernel, matrix_, m), KTK_ALIGNMENT);
    ktk_matmul mm{};
    mm.struct_size = sizeof mm;
    mm.matrix = &matrix_;
    mm.weight = packed_->data();
    mm.n_begin = n_begin;
    mm.n_end = n_end;
    mm.m = m;
    mm.act = act.data();
    mm.act_stride = act_size();
    mm.dst = floats(panel);
    mm.dst_stride = stride;
    mm.scratch = scratch.data();
    mm.prefetch = &prefetch();
    {
      const Unlocked unlocked;
      if (watched) {
        run_watched(kernel, mm);
      } else {
        if (variant_.enter) variant_.enter();
        kernel.run(&mm);
        if (variant_.leave) variant_.leave();
      }
    }
    check(panel, "run");
    check(scratch, "run");
  }

  void run_watched(const ktk_ukernel& kernel, ktk_matmul& mm) const {
    const auto call = [&](auto function, const char* name, bool tiles) {
      if (!function) return;
      const std::string names =
          changed_registers(reinterpret_cast<void (*)(void*)>(function), &mm, tiles);
      if (names.empty()) return;
      throw std::runtime_error(variant_.where + ": " + name + " of micro-kernel " + kernel.name +
                               " left changed what is its caller's: " + names);
    };
    call(variant_.enter, "enter", false);
    call(kernel.run, "run", false);
    call(variant_.leave, "leave", true);
  }

  std::shared_ptr<BackendTable> table_;
  const Variant& variant_;
  ktk_matrix matrix_{};
  size_t bytes_ = 0, act_size_ = 0;
  Lender lender_;
  std::optional<Lent> packed_;
};

}  // namespace ktk
