// Shared libraries that a backend computes with, found when its module is asked for the table.
//
// A backend of this kind is built without the library and without its headers: one wheel serves
// those who have it and those who do not. Functions are void pointers until a mode binds them, so
// a wrong prototype or a library that cannot do the work here shows in that mode's self-test, and
// the library is passed over with a reason.
#pragma once

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ktk {

// An open library; closed with its last owner.
class VendorLibrary {
 public:
  // Opens a path, or a name that the dynamic linker looks for. Throws std::runtime_error with what
  // the linker says. Everything is bound at once, and a missing dependency shows here and not in a
  // product; symbols stay local, for BLAS has many providers in one process.
  explicit VendorLibrary(const std::string& name);

  // The file that was opened, links resolved.
  const std::string& path() const { return path_; }

  void* find(const char* symbol) const;

  // Points `function` at a symbol. False, and NULL, where the library has none of that name.
  template <class Function>
  bool bind(const char* symbol, Function*& function) const {
    function = reinterpret_cast<Function*>(find(symbol));
    return function != nullptr;
  }

 private:
  std::shared_ptr<void> handle_;
  std::string path_;
};

// One way to use a library.
struct LibraryMode {
  std::string name;
  std::vector<const char*> symbols;  // all of these
  // Binds what the mode needs and tests it with a small product against a plain loop: libraries
  // print a line and leave the result alone where the CPU lacks something. Throws
  // std::runtime_error with the reason.
  std::function<void(const VendorLibrary&)> adopt;
};

struct LibraryRequest {
  const char* variable;            // of the environment; where it is set, nothing else is tried
  std::vector<std::string> names;  // in this order
  std::vector<LibraryMode> modes;  // best first; the best mode of any library counts
};

struct LibrarySearch {
  std::shared_ptr<const VendorLibrary> library;  // NULL: none was found
  std::vector<std::string> modes;                // that work with it, best first
  std::vector<std::string> absent;               // names of no library here
  std::vector<std::string> refused;              // "NAME (PATH): MODE REASON" of what did not work

  // What was looked for, where, and what was wrong with what was there.
  std::string failure(const LibraryRequest& request) const;
};

// Takes the first library with which the best mode works, or else the next one. Libraries that are
// passed over for one of their symbols are closed without having been called.
LibrarySearch find_library(const LibraryRequest& request);

// What Python hears about it: pairs of a word and what there is to say.
using LibraryFacts = std::vector<std::pair<std::string, std::string>>;

std::string join(const std::vector<std::string>& parts, const char* between);

}  // namespace ktk
