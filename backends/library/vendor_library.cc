#include "library/vendor_library.h"

#include <dlfcn.h>
#include <link.h>
#include <locale.h>
#include <stdlib.h>

namespace ktk {
namespace {

// No such file, as opposed to one that cannot be used.
class LibraryAbsent : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What the user wants; NULL: the first of the names will do.
const char* chosen(const LibraryRequest& request) {
  const char* wanted = getenv(request.variable);
  return wanted && *wanted ? wanted : nullptr;
}

// The dynamic linker tells apart what is absent and what is broken by its words alone, which it
// says in the language of the thread's locale.
std::string last_error() {
  static const locale_t english = newlocale(LC_ALL_MASK, "C", nullptr);
  const locale_t before = uselocale(english);
  const char* text = dlerror();
  const std::string reason = text ? text : "the dynamic linker gives no reason";
  uselocale(before);
  return reason;
}

std::shared_ptr<void> open_library(const std::string& name) {
  if (void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    return {handle, [](void* open) { dlclose(open); }};
  }
  const std::string reason = last_error();
  // The same words with another name in front are about a library that this one needs.
  if (reason == name + ": cannot open shared object file: No such file or directory") {
    throw LibraryAbsent(reason);
  }
  throw std::runtime_error(reason);
}

std::string path_of(void* handle) {
  link_map* map = nullptr;
  if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || !map) return {};
  const std::unique_ptr<char, decltype(&free)> real(realpath(map->l_name, nullptr), &free);
  return real ? real.get() : map->l_name;
}

struct Candidate {
  std::string name;
  std::shared_ptr<const VendorLibrary> library;
  std::vector<std::string> reasons;  // one for each mode that does not work

  std::string refusal() const {
    const bool elsewhere = library && library->path() != name;
    return name + (elsewhere ? " (" + library->path() + "): " : ": ") + join(reasons, "; ");
  }
};

// Empty if the mode works.
std::string try_mode(const LibraryMode& mode, const VendorLibrary& library) {
  for (const char* symbol : mode.symbols) {
    if (!library.find(symbol)) return "does not export " + std::string(symbol);
  }
  try {
    mode.adopt(library);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return {};
}

std::vector<Candidate> open_all(const std::vector<std::string>& names, LibrarySearch& search) {
  std::vector<Candidate> candidates;
  for (const std::string& name : names) {
    Candidate candidate{name, nullptr, {}};
    try {
      candidate.library = std::make_shared<const VendorLibrary>(name);
    } catch (const LibraryAbsent&) {
      search.absent.push_back(name);
      continue;
    } catch (const std::runtime_error& error) {
      candidate.reasons.emplace_back(error.what());
    }
    bool known = false;  // libfoo.so and libfoo.so.1 are often the same file
    for (const Candidate& other : candidates) {
      known = known || (candidate.library && other.library &&
                        candidate.library->path() == other.library->path());
    }
    if (!known) candidates.push_back(std::move(candidate));
  }
  return candidates;
}

}  // namespace

VendorLibrary::VendorLibrary(const std::string& name)
    : handle_(open_library(name)), path_(path_of(handle_.get())) {}

void* VendorLibrary::find(const char* symbol) const { return dlsym(handle_.get(), symbol); }

LibrarySearch find_library(const LibraryRequest& request) {
  LibrarySearch search;
  const char* wanted = chosen(request);
  std::vector<Candidate> candidates =
      open_all(wanted ? std::vector<std::string>{wanted} : request.names, search);
  for (auto mode = request.modes.begin(); mode != request.modes.end() && !search.library; ++mode) {
    for (Candidate& candidate : candidates) {
      if (!candidate.library) continue;
      const std::string reason = try_mode(*mode, *candidate.library);
      if (!reason.empty()) {
        candidate.reasons.push_back(mode->name + " " + reason);
        continue;
      }
      search.library = candidate.library;
      search.modes.push_back(mode->name);
      for (auto lesser = mode + 1; lesser != request.modes.end(); ++lesser) {
        if (try_mode(*lesser, *candidate.library).empty()) search.modes.push_back(lesser->name);
      }
      break;
    }
  }
  for (const Candidate& candidate : candidates) {
    if (!candidate.reasons.empty()) search.refused.push_back(candidate.refusal());
  }
  return search;
}

std::string LibrarySearch::failure(const LibraryRequest& request) const {
  std::string text = request.variable;
  const char* wanted = chosen(request);
  if (wanted && !absent.empty()) {
    text.append("=").append(wanted).append(": there is no such library");
  } else if (wanted) {
    text += " names what cannot be used";
  } else {
    text.append(" is not set, and of ").append(join(request.names, ", "));
    text += " none that can be used is in LD_LIBRARY_PATH or the system's folders of libraries";
  }
  return refused.empty() ? text : text + ": " + join(refused, "; ");
}

std::string join(const std::vector<std::string>& parts, const char* between) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : between) + part;
  return text;
}

}  // namespace ktk
