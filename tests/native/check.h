// The little that these tests need of a test framework: every TEST of a program runs, a failed
// check says where and with what values, and the exit status counts the tests that failed.
#pragma once

#include <cstdio>
#include <exception>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Add {
  Add(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

struct Failure : std::exception {
  explicit Failure(std::string text) : message(std::move(text)) {}
  const char* what() const noexcept override { return message.c_str(); }
  std::string message;
};

template <typename T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (requires { value.begin(); } && !requires { out << value; }) {
    out << "{";
    for (const auto& item : value) out << " " << show(item);
    out << " }";
  } else {
    out << std::boolalpha << value;
  }
  return out.str();
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& message) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + message);
}

// The message of the exception that `body` throws.
template <typename Exception, typename Body>
std::string thrown(const char* file, int line, const char* text, Body body) {
  try {
    body();
  } catch (const Exception& error) {
    return error.what();
  }
  fail(file, line, std::string(text) + " did not throw");
}

}  // namespace check

#define TEST(name)                                 \
  static void name();                              \
  static const check::Add add_##name{#name, name}; \
  static void name()

#define CHECK(condition) \
  if (!(condition)) check::fail(__FILE__, __LINE__, "not true: " #condition)

// The expected value may be a braced list.
#define CHECK_EQ(actual, ...)                                                                      \
  do {                                                                                             \
    const auto actual_ = (actual);                                                                 \
    const decltype(actual_) expected_ = __VA_ARGS__;                                               \
    if (!(actual_ == expected_)) {                                                                 \
      check::fail(__FILE__, __LINE__,                                                              \
                  #actual " is " + check::show(actual_) + ", expected " + check::show(expected_)); \
    }                                                                                              \
  } while (false)

#define CHECK_LESS(actual, bound)                                                  \
  do {                                                                             \
    const auto actual_ = (actual);                                                 \
    if (!(actual_ < (bound))) {                                                    \
      check::fail(__FILE__, __LINE__,                                              \
                  #actual " is " + check::show(actual_) + ", expected < " #bound); \
    }                                                                              \
  } while (false)

// Throws unless the expression throws `type`; its value is the message.
#define CHECK_THROWS(type, ...) \
  check::thrown<type>(__FILE__, __LINE__, #__VA_ARGS__, [&] { __VA_ARGS__; })

int main() {
  int failed = 0;
  for (const check::Test& test : check::tests()) {
    try {
      test.body();
      std::printf("ok      %s\n", test.name);
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED  %s\n        %s\n", test.name, error.what());
    }
    std::fflush(stdout);
  }
  return failed == 0 ? 0 : 1;
}
