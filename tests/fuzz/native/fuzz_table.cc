// A backend's table with any numbers, names and missing functions, and sizes that are lies.
//
// BackendTable::copy() believes that pointers which are not NULL point at what abi.h says; every
// struct and list here has just the bytes that the table announces. What is refused says so by
// std::invalid_argument (AbiError for another ABI); what is not has sizes that are checked where
// they are asked for: std::runtime_error, std::length_error, or std::bad_alloc for those that the
// machine does not have.
#include <new>
#include <stdexcept>

#include "core/memory.h"
#include "core/size.h"
#include "input.h"
#include "moe/weights.h"

// This target has no backend of its own.
const ktk_backend kFuzzedBackend = {};

namespace fuzz {
namespace {

size_t said[4];  // by the functions of the table
size_t weight_size(const ktk_matrix*) { return said[0]; }
size_t act_size(const ktk_matrix*) { return said[1]; }
size_t scratch_size(const ktk_matrix*, size_t) { return said[2]; }
size_t source_size(const ktk_matrix*, const ktk_source*, size_t, size_t) { return said[3]; }
void pack_weight(const ktk_matrix*, const ktk_source*, size_t, size_t, void*) {}
void pack_sized(const ktk_matrix*, const ktk_source*, size_t, size_t, void*, size_t) {}
void unpack_weight(const ktk_matrix*, const void*, size_t, size_t, float*, size_t) {}
void export_weight(const ktk_matrix*, const void*, size_t, size_t, const ktk_export*) {}
void pack_act(const ktk_matrix*, size_t, size_t, size_t, const float*, size_t, void*, size_t) {}
void unpack_act(const ktk_matrix*, size_t, const void*, size_t, float*, size_t) {}
void run(const ktk_matmul*) {}
void enter() {}
int is_packed(const ktk_matrix*, const void*, size_t) { return 1; }
ktk_format said_format;
void act_format(const ktk_matrix*, ktk_format* format) { *format = said_format; }

class TableMaker {
 public:
  explicit TableMaker(Input& input) : input_(input) {}

  const ktk_backend* backend() {
    ktk_backend table{};
    table.abi_major = rarely() ? input_.any<uint32_t>() : KTK_ABI_MAJOR;
    table.abi_minor = input_.any<uint32_t>();
    table.name = name();
    table.formats = list<ktk_format>(table.num_formats, [&] { return format(); });
    table.accepts = list<ktk_accept>(
        table.num_accepts, [&] { return ktk_accept{format(), input_.in<uint32_t>(0, 3)}; });
    table.variants = list<const ktk_variant*>(table.num_variants, [&] { return variant(); });
    return sized(table);
  }

 private:
  bool rarely() { return input_.in<int>(0, 31) == 31; }
  template <typename T>
  T* unless_rarely(T* pointer) {
    return rarely() ? nullptr : pointer;
  }

  char* room(size_t bytes) {
    kept_.push_back(std::make_unique<char[]>(bytes));  // watched by AddressSanitizer
    return kept_.back().get();
  }

  // A struct that has as many bytes as it says, if a struct may have so many.
  template <typename T>
  const T* sized(T value) {
    value.struct_size = sizeof(T);
    if (rarely()) value.struct_size = input_.any<size_t>();
    if (rarely()) value.struct_size = input_.in<size_t>(8, 400);
    // The size and the version of the ABI are always there: they say how to read the rest.
    const size_t bytes = value.struct_size <= 4096 ? std::max<size_t>(value.struct_size, 16) : 4096;
    char* at = room(bytes);
    std::memset(at, 0, bytes);
    std::memcpy(at, &value, std::min(bytes, sizeof(T)));
    return reinterpret_cast<const T*>(at);
  }

  template <typename T, typename Make>
  const T* list(size_t& count, const Make& make) {
    const size_t there = input_.in<size_t>(1, 3);
    T* all = reinterpret_cast<T*>(room(there * sizeof(T)));
    for (size_t i = 0; i < there; ++i) all[i] = make();
    count = there;
    if (rarely()) count = input_.flag() ? 0 : size_t{4097} + input_.any<uint32_t>();
    return unless_rarely(all);
  }

  const char* name() {
    if (rarely()) return nullptr;
    const std::string text = input_.text(12);
    char* at = room(text.size() + 1);
    std::memcpy(at, text.c_str(), text.size() + 1);
    return at;
  }

  ktk_element element() {
    if (rarely()) return input_.any<uint32_t>();
    const uint32_t number = input_.in<uint32_t>(0, 60);
    return number <= KTK_I16 ? number : KTK_GGML + number - KTK_I16;
  }
  uint32_t group() { return rarely() ? input_.any<uint32_t>() : 16 * input_.in<uint32_t>(0, 16); }
  ktk_format format() {
    if (input_.flag()) return {KTK_F32, KTK_NONE, KTK_NONE, 0, 0};
    return {element(), element(), element(), group(), group()};
  }

  const ktk_ukernel* kernels(size_t& count) {
    // One after the other, as far apart as the first one is large.
    count = input_.in<size_t>(1, 3);
    const size_t size = rarely() ? input_.in<size_t>(0, 512) : sizeof(ktk_ukernel);
    const size_t step = std::max<size_t>(size, sizeof(size_t));
    char* all = room(count * step);
    for (size_t i = 0; i < count; ++i) {
      ktk_ukernel kernel{};
      kernel.struct_size = size;
      kernel.name = name();
      kernel.m_max = i + 1 < count ? input_.in<size_t>(0, 40) : SIZE_MAX;
      kernel.scratch_size = input_.flag() ? scratch_size : nullptr;
      kernel.run = unless_rarely(run);
      std::memcpy(all + i * step, &kernel, std::min(step, sizeof kernel));
    }
    return unless_rarely(reinterpret_cast<const ktk_ukernel*>(all));
  }

  uint32_t step() {
    return rarely() ? input_.any<uint32_t>() : uint32_t{1} << input_.in<int>(0, 8);
  }

  const ktk_variant* variant() {
    if (rarely()) return nullptr;
    ktk_variant v{};
    v.name = name();
    v.layout = name();
    v.tile = {step(), step(), step()};
    v.act = format();
    v.weight_size = unless_rarely(weight_size);
    const bool is_sized = input_.flag();
    v.pack_weight = is_sized ? nullptr : unless_rarely(pack_weight);
    v.source_size = is_sized ? unless_rarely(source_size) : nullptr;
    v.pack_sized = is_sized ? unless_rarely(pack_sized) : nullptr;
    v.is_packed = is_sized ? unless_rarely(is_packed) : nullptr;
    v.export_weight = unless_rarely(export_weight);
    v.unpack_weight = unless_rarely(unpack_weight);
    v.act_format = input_.flag() ? act_format : nullptr;
    v.act_size = unless_rarely(act_size);
    v.pack_act = unless_rarely(pack_act);
    v.unpack_act = unless_rarely(unpack_act);
    v.ukernels = kernels(v.num_ukernels);
    v.enter = rarely() ? enter : nullptr;
    v.leave = rarely() ? enter : nullptr;
    return sized(v);
  }

  Input& input_;
  std::vector<std::unique_ptr<char[]>> kept_;
};

// Asks for all sizes of a layer, as loading and calling it would.
void ask(const ktk::BackendTable& table, Input& input) {
  for (size_t& bytes : said) {
    bytes = input.flag() ? input.any<size_t>() : KTK_ALIGNMENT * input.in<size_t>(0, 64);
  }
  said_format = table.formats.front();
  const ktk::Variant& v = table.select("");
  const size_t hidden = input.in<size_t>(0, 600);
  const size_t most = input.flag() ? 600 : size_t{1} << 25;
  const size_t intermediate = input.in<size_t>(0, most);
  for (const ktk_accept& accepted : table.accepts) {
    const ktk_format& stored = table.stored(accepted.given, nullptr, intermediate, hidden);
    const ktk_matrix matrix = table.matrix(stored, intermediate, hidden);
    v.weight_bytes(matrix);
    v.weight_bytes(matrix, said[3]);
    v.act_bytes(matrix);
    v.act_of(matrix);
    for (const ktk_ukernel& kernel : v.kernels) v.scratch_bytes(kernel, matrix, 7);
    ktk::ExpertSource source{};
    source.gate.format = source.up.format = source.down.format = accepted.given;
    const ktk::Config config{
        .num_experts = input.in<size_t>(1, input.in<int>(0, 15) == 15 ? 1u << 16 : 64),
        .top_k = 1,
        .hidden = hidden,
        .intermediate = intermediate};
    const std::vector<int> nodes(input.in<size_t>(1, 4), -1);
    const ktk::Weights weights(config, v, {stored, stored, stored}, source, nodes);
    weights.expert_bytes();
  }
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  fuzz::Input input(bytes, size);
  fuzz::TableMaker maker(input);
  try {
    fuzz::ask(*ktk::BackendTable::copy(maker.backend()), input);
  } catch (const std::invalid_argument&) {
  } catch (const std::length_error&) {
  } catch (const std::runtime_error&) {
  } catch (const std::bad_alloc&) {
  }
  return 0;
}
