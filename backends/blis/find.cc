#include "blis/find.h"

#include <cstdlib>

#include "blis/self_test.h"

namespace ktk::blis {
namespace {

constexpr char kLpgemm[] = "lpgemm-int8", kSgemm[] = "sgemm";

// --- threads

using SetThreads = void(int64_t);

SetThreads* set_threads;  // of the library that was taken

// AMD's libraries keep the number of threads per thread, BLIS itself has one for the process. Both
// start threads in every worker that did not say that it wants none.
void one_thread() {
  thread_local SetThreads* told = nullptr;
  if (told == set_threads) return;
  set_threads(1);
  told = set_threads;
}

SetThreads* bind_set_threads(const VendorLibrary& library) {
  SetThreads* function = nullptr;
  if (!library.bind("dlp_thread_set_num_threads_local", function) &&
      !library.bind("bli_thread_set_num_threads", function)) {
    throw std::runtime_error(
        "exports neither dlp_thread_set_num_threads_local nor bli_thread_set_num_threads");
  }
  return function;
}

// --- modes

void start(const VendorLibrary& library) {
  void (*init)() = nullptr;
  if (library.bind("bli_init", init)) init();
  set_threads = bind_set_threads(library);
  one_thread();
}

void adopt_lpgemm(const VendorLibrary& library, Calls& calls) {
  start(library);
  library.bind("aocl_get_reorder_buf_size_s8s8s32os32", calls.reorder_size);
  library.bind("aocl_reorder_s8s8s32os32", calls.reorder);
  library.bind("aocl_gemm_s8s8s32os32", calls.gemm_s8);
  test_lpgemm(calls);
}

void adopt_sgemm(const VendorLibrary& library, Calls& calls) {
  int64_t (*int_bits)() = nullptr;
  library.bind("bli_info_get_blas_int_type_size", int_bits);
  const int bits = static_cast<int>(int_bits());
  if (bits != 32) {
    throw std::runtime_error("has BLAS integers of " + std::to_string(bits) +
                             " bits, not the usual 32");
  }
  start(library);
  library.bind("cblas_sgemm", calls.sgemm);
  test_sgemm(calls);
}

LibraryRequest request_for(Calls& calls) {
  return {
      .variable = "KTK_BLIS_LIBRARY",
      .names = {"libaocl-dlp.so", "libblis-mt.so.5", "libblis-mt.so", "libblis.so.5",
                "libblis.so.4", "libblis.so"},
      .modes =
          {
              {kLpgemm,
               {"aocl_get_reorder_buf_size_s8s8s32os32", "aocl_reorder_s8s8s32os32",
                "aocl_gemm_s8s8s32os32"},
               [&calls](const VendorLibrary& library) { adopt_lpgemm(library, calls); }},
              {kSgemm,
               {"cblas_sgemm", "bli_info_get_blas_int_type_size"},
               [&calls](const VendorLibrary& library) { adopt_sgemm(library, calls); }},
          },
  };
}

// --- what there is to say

std::string version(const VendorLibrary& library) {
  const char* (*text)() = nullptr;
  if (library.bind("bli_info_get_version_str", text)) return text();
  void (*query)(int*, int*, int*) = nullptr;
  if (!library.bind("dlp_version_query", query)) return {};
  int major = 0, minor = 0, patch = 0;
  query(&major, &minor, &patch);
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

// The kernels that BLIS picked for this CPU.
struct Family {
  std::string name;    // empty: the library does not say
  std::string better;  // "BLIS_ARCH_TYPE=6 (zen3)": what would suit the CPU; empty: nothing known
};

std::string better_family(const char* (*name_of)(int), int generic) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("fma") || getenv("BLIS_ARCH_TYPE")) return {};
  const bool amd = __builtin_cpu_is("amd"), avx512 = __builtin_cpu_supports("avx512f");
  const std::vector<std::string> suitable =
      amd      ? std::vector<std::string>{"zen3", "zen2", "zen", "haswell"}
      : avx512 ? std::vector<std::string>{"skx", "haswell"}
               : std::vector<std::string>{"haswell"};
  for (const std::string& wanted : suitable) {
    // Numbers differ between versions; `generic` is always the last one.
    for (int number = 0; number < generic; ++number) {
      if (wanted == name_of(number)) {
        return "BLIS_ARCH_TYPE=" + std::to_string(number) + " (" + wanted + ")";
      }
    }
  }
#endif
  return {};
}

// Asked after bli_init() only: before it, a wrong BLIS_ARCH_TYPE ends the process here.
Family family(const VendorLibrary& library) {
  int (*query)() = nullptr;
  const char* (*name_of)(int) = nullptr;
  if (!library.bind("bli_arch_query_id", query) || !library.bind("bli_arch_string", name_of)) {
    return {};
  }
  const int number = query();
  const std::string name = name_of(number);
  return {name, name == "generic" ? better_family(name_of, number) : ""};
}

constexpr char kAdvice[] =
    ". AMD's AOCL-DLP, or AOCL-BLAS with its aocl_gemm addon, gives int8 products; a BLIS like "
    "Debian's (apt-get install libblis4-openmp) gives float products, which work and are slow; "
    "KTK_BLIS_LIBRARY=/path/to/library.so names one that is elsewhere. AMXINT8 takes the same "
    "weights and needs no library";

}  // namespace

Found find() {
  Found found;
  const LibraryRequest request = request_for(found.calls);
  const LibrarySearch search = find_library(request);
  if (!search.library) {
    found.failure = search.failure(request) + kAdvice;
    const char* named = getenv(request.variable);
    if (named && *named) {
      const std::string variable = request.variable;
      found.brief = variable + " names no library that can be used";
      found.advice = "unset " + variable + ", or name another library";
    } else {
      found.brief = "needs a BLIS library, and finds none";
      found.advice =
          "apt-get install libblis4-openmp, where it is wanted; AMXINT8 takes the same weights and "
          "needs no library";
    }
    return found;
  }
  found.library = search.library;
  found.calls.one_thread = one_thread;
  found.lpgemm = search.modes.front() == kLpgemm;
  found.sgemm = search.modes.back() == kSgemm;
  if (found.lpgemm)
    found.layout = std::string(kTilesLayout) + "-" + reorder_fingerprint(found.calls);

  const std::string path = search.library->path(), number = version(*search.library);
  const Family kernels = family(*search.library);
  found.facts = {{"library", path}, {"mode", join(search.modes, ", ")}};
  if (!number.empty()) found.facts.emplace_back("version", number);
  if (!kernels.name.empty()) found.facts.emplace_back("kernels", kernels.name);
  if (!search.refused.empty()) {
    found.facts.emplace_back("refused", join(search.refused, "; "));
  }
  std::vector<std::string> slow;
  if (!found.lpgemm) slow.emplace_back("has no int8 products and multiplies floats");
  if (!kernels.better.empty()) {
    slow.push_back(
        "does not know this CPU and runs its generic kernels unless the program is "
        "started with " +
        kernels.better);
  }
  if (!slow.empty()) {
    found.warning = "BLIS will be slow: " + path + " " + join(slow, ", and ") +
                    "; AMXINT8 takes the same weights";
  }
  return found;
}

}  // namespace ktk::blis
