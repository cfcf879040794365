// Runs a fuzzer without libFuzzer: over the files of a folder, and over as many inputs made of
// them.
//
//   fuzz_table FOLDER [COUNT]
//
// Those are the same in every run.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

std::vector<Bytes> read_folder(const char* folder) {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> found;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    found.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return found;
}

Bytes mutated(const std::vector<Bytes>& all, std::mt19937& random) {
  Bytes made = all[random() % all.size()];
  for (unsigned i = random() % 8; i > 0 && !made.empty(); --i) {
    made[random() % made.size()] = static_cast<uint8_t>(random());
  }
  const Bytes& other = all[random() % all.size()];
  if (random() % 4 == 0) made.insert(made.end(), other.begin(), other.end());
  return made;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Bytes> all = read_folder(argv[1]);
  if (all.empty()) {
    std::fprintf(stderr, "%s is empty\n", argv[1]);
    return 1;
  }
  for (const Bytes& one : all) LLVMFuzzerTestOneInput(one.data(), one.size());
  std::mt19937 random(1);
  const int count = argc > 2 ? std::atoi(argv[2]) : 0;
  for (int i = 0; i < count; ++i) {
    const Bytes one = mutated(all, random);
    LLVMFuzzerTestOneInput(one.data(), one.size());
  }
  std::printf("%zu inputs, and %d made of them\n", all.size(), count);
}
