// One matrix of any bytes through everything that a backend does: it is packed as a whole and in
// parts, unpacked, exported and packed again, and multiplied with rows of any floats.
//
// Beyond what the sanitizers and guard pages see, these hold for all inputs (abi.h):
//   - packing writes every byte, and the same ones whatever ranges it is cut into;
//   - what was exported packs to the same weights;
//   - is_packed() takes what was packed, and what it takes can be computed with;
//   - a row's product has the same bits in any batch and by any micro-kernel.
#include "core/prefetch.h"
#include "input.h"

namespace fuzz {
namespace {

size_t source_bytes(const ktk::Variant& v, const ktk_matrix& matrix, const ktk_source& source) {
  size_t most = 0;
  for (size_t n = 0; n < matrix.n; n += v.tile.n_step) {
    const size_t end = std::min<size_t>(n + v.tile.n_step, matrix.n);
    most = std::max(most, v.source_bytes(matrix, source, n, end));
  }
  return v.weight_bytes(matrix, most);
}

Area pack(const ktk::Variant& v, const ktk_matrix& matrix, const ktk_source& source, size_t bytes,
          size_t rows) {
  Area packed(bytes);
  std::memset(packed.data(), static_cast<int>(rows), bytes);  // may hold anything
  for (size_t n = 0; n < matrix.n; n += rows) {
    v.pack(matrix, source, n, std::min(n + rows, matrix.n), packed.data(), bytes);
  }
  packed.check("pack_weight");
  return packed;
}

Area unpack(const ktk::Variant& v, const ktk_matrix& matrix, const Area& packed, size_t begin,
            size_t end) {
  Area out((end - begin) * matrix.k * sizeof(float), sizeof(float));
  v.unpack_weight(&matrix, packed.data(), begin, end, out.floats(), matrix.k);
  out.check("unpack_weight");
  return out;
}

// Exports a matrix, and packs that.
void check_export(const ktk::Variant& v, const ktk_matrix& matrix, const ktk_format& stored,
                  const Area& packed) {
  const ktk_format& f = matrix.format;
  const ktk::SourceShape shape = ktk::source_shape(f, matrix.n, matrix.k);
  const Area data(matrix.n * shape.data_bytes, 1), scale(shape.groups_n * shape.scale_bytes, 1),
      zero(shape.groups_n * shape.zero_bytes, 1);
  const auto given = [](const Area& part) { return part.size() ? part.data() : nullptr; };
  const ktk_export target = {given(data),      given(scale),      given(zero),
                             shape.data_bytes, shape.scale_bytes, shape.zero_bytes};
  v.export_weight(&matrix, packed.data(), 0, matrix.n, &target);
  for (const Area* part : {&data, &scale, &zero}) part->check("export_weight");

  // A backend may store what it cannot be given.
  const auto is_taken = [&](const ktk_accept& accepted) {
    return &table().formats[accepted.stored] == &stored &&
           ktk::same_format(accepted.given, f, matrix.n, matrix.k);
  };
  if (std::none_of(table().accepts.begin(), table().accepts.end(), is_taken)) return;

  // Arrays that are given are aligned to their elements.
  const auto aligned = [](const Area& from, ktk_element element) {
    const ktk::Block block = ktk::block_of(element);
    Area copy(from.size(), block.columns == 1 ? std::max<size_t>(block.bytes, 1) : 1);
    std::memcpy(copy.data(), from.data(), from.size());
    return copy;
  };
  const Area data_in = aligned(data, f.element), scale_in = aligned(scale, f.scale),
             zero_in = aligned(zero, f.zero);
  const ktk_source source = {f,
                             given(data_in),
                             given(scale_in),
                             given(zero_in),
                             shape.data_bytes,
                             shape.scale_bytes,
                             shape.zero_bytes};
  require(source_bytes(v, matrix, source) <= packed.size(), "what was exported takes no more");
  const Area again = pack(v, matrix, source, packed.size(), matrix.n);
  const Area values = unpack(v, matrix, packed, 0, matrix.n),
             same_values = unpack(v, matrix, again, 0, matrix.n);
  require(same(values.floats(), same_values.floats(), matrix.n * matrix.k),
          "what was exported is the same");
}

// Rows of any floats, encoded.
struct Acts {
  size_t stride, padded;
  Area rows;

  Acts(const ktk::Variant& v, const ktk_matrix& matrix, const float* x, size_t m)
      : stride(v.act_bytes(matrix)),
        padded(ktk::round_up(m, v.tile.m_step)),
        rows(stride * padded) {
    v.pack_act(&matrix, m, 0, matrix.k, x, matrix.k, rows.data(), stride);
    rows.check("pack_act");
  }
};

std::vector<float> multiply(const ktk::Variant& v, const ktk_ukernel& kernel,
                            const ktk_matrix& matrix, const Area& packed, const Acts& acts,
                            size_t m, size_t begin, size_t end) {
  const size_t columns = ktk::round_up(end - begin, v.tile.n_step);
  const size_t stride = ktk::round_up(columns, 16);
  const Area dst(((acts.padded - 1) * stride + columns) * sizeof(float));
  const Area scratch(v.scratch_bytes(kernel, matrix, m));
  ktk_matmul mm{};
  mm.struct_size = sizeof mm;
  mm.matrix = &matrix;
  mm.weight = packed.data();
  mm.n_begin = begin;
  mm.n_end = end;
  mm.m = m;
  mm.act = acts.rows.data();
  mm.act_stride = acts.stride;
  mm.dst = dst.floats();
  mm.dst_stride = stride;
  mm.scratch = scratch.data();
  mm.prefetch = &ktk::prefetch();
  if (v.enter) v.enter();
  kernel.run(&mm);
  if (v.leave) v.leave();
  for (const Area* area : {&dst, &scratch, &packed, &acts.rows}) area->check(kernel.name);
  std::vector<float> out;
  for (size_t row = 0; row < m; ++row) {
    out.insert(out.end(), dst.floats() + row * stride, dst.floats() + row * stride + end - begin);
  }
  return out;
}

void check_products(const ktk::Variant& v, const ktk_matrix& matrix, const Area& packed,
                    Input& input) {
  const size_t m = input.in<size_t>(1, 20);
  const size_t steps = (matrix.n - 1) / v.tile.n_step;
  const size_t begin = input.in<size_t>(0, steps) * v.tile.n_step;
  std::string some = input.bytes(600);
  if (some.empty()) some = std::string("\0\0\x80\x3f", 4);
  const Area x(m * matrix.k * sizeof(float), sizeof(float));
  fill(x.data(), x.size(), some);

  const Acts acts(v, matrix, x.floats(), m);
  const Area decoded(x.size(), sizeof(float));
  v.unpack_act(&matrix, m, acts.rows.data(), acts.stride, decoded.floats(), matrix.k);
  decoded.check("unpack_act");

  const size_t row = input.in<size_t>(0, m - 1), columns = matrix.n - begin;
  const Acts alone(v, matrix, x.floats() + row * matrix.k, 1);
  const std::vector<float> expected =
      multiply(v, v.kernels.front(), matrix, packed, alone, 1, begin, matrix.n);
  for (const ktk_ukernel& kernel : v.kernels) {
    if (m > kernel.m_max) continue;
    const std::vector<float> out = multiply(v, kernel, matrix, packed, acts, m, begin, matrix.n);
    require(same(out.data() + row * columns, expected.data(), columns),
            "a row has the same bits in any batch");
  }
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using namespace fuzz;
  Input input(bytes, size);
  const ktk::Variant& v = variant(input);
  const ktk_accept& accepted = accept(input);
  const ktk_format& stored = table().formats[accepted.stored];
  const size_t block = ktk::common_multiple(ktk::block_of(accepted.given.element).columns,
                                            ktk::block_of(stored.element).columns);
  const size_t n = input.in<size_t>(1, 70);
  const size_t k = ktk::round_up(input.in<size_t>(1, 300), block);
  const ktk_matrix matrix = table().matrix(stored, n, k);
  const Weight weight(accepted.given, n, k, input);

  const size_t whole = source_bytes(v, matrix, weight.source);
  const Area packed = pack(v, matrix, weight.source, whole, n);
  const size_t rows = input.in<size_t>(1, 3) * v.tile.n_step;
  const Area parts = pack(v, matrix, weight.source, whole, rows);
  require(!std::memcmp(packed.data(), parts.data(), whole), "packing in parts is the same");

  const Area values = unpack(v, matrix, packed, 0, n);
  const size_t some = input.in<size_t>(0, n - 1);
  const Area few = unpack(v, matrix, packed, some, n);
  require(same(few.floats(), values.floats() + some * k, (n - some) * k),
          "unpacking in parts is the same");
  if (v.export_weight) check_export(v, matrix, stored, packed);

  if (v.is_packed) {
    require(v.is_packed(&matrix, packed.data(), whole), "is_packed() takes what was packed");
    for (int i = input.in<int>(0, 4); i > 0; --i) {
      const size_t at = input.in<size_t>(0, whole - 1);
      packed.data()[at] = static_cast<char>(input.any<uint8_t>());
    }
    const size_t other = input.flag() ? whole : input.in<size_t>(0, whole);
    const Area given(other);
    std::memcpy(given.data(), packed.data(), other);
    if (!v.is_packed(&matrix, given.data(), other)) return 0;
    unpack(v, matrix, given, 0, n);
    check_products(v, matrix, given, input);
    return 0;
  }
  check_products(v, matrix, packed, input);
  return 0;
}
