// Experts that are still in files while they are loaded, with the packers of one backend.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "check.h"
#include "core/size.h"
#include "kernels.h"
#include "moe/layer.h"

namespace {

// Off every step, but made of whole blocks of ggml's types, of which three shards have one each.
ktk::Config config_of(const ktk_format& given, bool gated) {
  const size_t step = ktk::is_ggml(given.element) ? ktk::block_of(given.element).columns : 1;
  const size_t hidden = ktk::round_up(70, step), intermediate = ktk::round_up(530, step);
  return {2, 1, hidden, intermediate, {KTK_SILU, 1.0f, INFINITY, false, 0, 0}, gated};
}

std::unique_ptr<ktk::Layer> empty_layer(const ktk::Config& config, const std::string& variant,
                                        int shards) {
  return std::make_unique<ktk::Layer>(ktk::BackendTable::copy(&kBackend), variant, false, config,
                                      ktk::Engine::make({.threads = 3, .cpus = {}, .pin = false}),
                                      shards, ktk::Parts<std::optional<ktk_format>>{});
}

// An expert in a file, and in memory that holds something else.
struct InFile {
  Weight gate, up, down;
  std::FILE* file = std::tmpfile();
  std::vector<std::vector<char>> memory;
  std::vector<ktk::Unread> unread;
  ktk::ExpertSource source, plain;

  InFile(const ktk_format& given, const ktk::Config& config)
      : gate(given, config.intermediate, config.hidden, 0),
        up(given, config.intermediate, config.hidden, 1),
        down(given, config.hidden, config.intermediate, 2),
        source{{config.gated ? gate.source : up.source, up.source, down.source}},
        plain(source) {
    for (ktk_source* const part : {&source.gate, &source.up, &source.down}) {
      if (part == &source.gate && !config.gated) continue;
      const size_t rows = part == &source.down ? config.hidden : config.intermediate;
      std::vector<char>& bytes = memory.emplace_back(rows * part->data_stride);
      unread.push_back({unread.size(), fileno(file), static_cast<uint64_t>(std::ftell(file)),
                        bytes.data(), bytes.size(), 0, 0});
      CHECK_EQ(std::fwrite(part->data, part->data_stride, rows, file), rows);
      part->data = bytes.data();
    }
    if (!config.gated) source.gate = source.up;
    std::fflush(file);
    struct stat found;
    CHECK_EQ(fstat(fileno(file), &found), 0);
    for (ktk::Unread& one : unread) {
      one.file_bytes = found.st_size;
      one.changed_ns = found.st_mtim.tv_sec * int64_t{1'000'000'000} + found.st_mtim.tv_nsec;
    }
    source.unread = unread;
    forget();
  }
  InFile(const InFile&) = delete;
  ~InFile() { std::fclose(file); }

  void forget() {
    for (std::vector<char>& bytes : memory) std::ranges::fill(bytes, '\x55');
  }
};

// Rows that are read in one piece and in several.
constexpr size_t kWide = 4096;
std::vector<ktk::Config> configs_of_files(const ktk_format& given) {
  ktk::Config wide = config_of(given, true);
  wide.hidden = kWide;
  return {config_of(given, true), config_of(given, false), wide};
}

// The core cuts rows into pieces, the same ones for each variant, and wide rows take their time.
std::vector<std::string> variants_for(const ktk::Config& config) {
  return config.hidden == kWide ? std::vector<std::string>{""} : runnable();
}

}  // namespace

// Each worker reads the rows that it packs; where columns are cut, those of down are read first.
TEST(what_is_in_a_file_is_packed_as_what_is_in_memory) {
  for (const ktk_format& given : kGiven) {
    for (const ktk::Config& config : configs_of_files(given)) {
      InFile expert(given, config);
      for (const std::string& variant : variants_for(config)) {
        for (const int shards : {1, 3}) {
          const auto read = empty_layer(config, variant, shards);
          const auto plain = empty_layer(config, variant, shards);
          expert.forget();
          read->load(0, expert.source);
          plain->load(0, expert.plain);
          const size_t part = config.hidden * config.intermediate;
          std::vector<float> got(3 * part), wanted(3 * part);
          for (const auto& [of, all] : {std::pair{&read, &got}, std::pair{&plain, &wanted}}) {
            float* const first = all->data();
            (*of)->weights()->unpack(0, first, first + part, first + 2 * part);
          }
          CHECK(std::memcmp(got.data(), wanted.data(), got.size() * sizeof(float)) == 0);
        }
      }
    }
  }
}

TEST(a_file_that_is_cut_or_changed_loads_nothing) {
  for (const ktk_format& given : kGiven) {
    InFile expert(given, config_of(given, true));
    const auto fails = [&](int shards) {
      const auto layer = empty_layer(config_of(given, true), "", shards);
      try {
        layer->load(0, expert.source);
      } catch (const ktk::ReadFailure& failure) {
        return failure.error == 0 && failure.which < 3 && !layer->weights();
      }
      return false;
    };
    expert.unread[1].changed_ns ^= 1;
    CHECK(fails(1) && fails(3));
    expert.unread[1].changed_ns ^= 1;
    CHECK_EQ(ftruncate(fileno(expert.file), expert.unread[1].file_bytes / 2), 0);
    CHECK(fails(1) && fails(3));
  }
}
