// Dense layers with the kernels of one backend, for the sanitizers, as test_layer.cc: the numbers
// are the conformance kit's business.
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "core/size.h"
#include "dense/linear.h"
#include "format/elements.h"
#include "kernels.h"
#include "stream/job.h"

namespace {

using ktk::Linear;

// Off every step, and more than the groups of 128 that a shard may begin in.
constexpr size_t kRows = 275;

size_t depth(const ktk_format& given) {
  return ktk::is_ggml(given.element) ? ktk::block_of(given.element).columns : 150;
}

std::shared_ptr<Linear> empty_linear(size_t k, size_t n, const std::string& variant, int threads,
                                     int shards) {
  return std::make_shared<Linear>(ktk::BackendTable::copy(&kBackend), variant, false, k, n,
                                  ktk::Engine::make({.threads = threads, .cpus = {}, .pin = false}),
                                  shards);
}

// A weight of parts in these formats, with a bias for every second one.
struct Parts {
  std::vector<std::unique_ptr<Weight>> weights;
  std::vector<std::vector<float>> biases;
  std::vector<ktk::DensePart> parts;
  size_t n = 0;

  void add(const ktk_format& given, size_t rows, size_t k) {
    const unsigned seed = static_cast<unsigned>(parts.size());
    weights.push_back(std::make_unique<Weight>(given, rows, k, seed));
    biases.emplace_back(rows, 0.5f);
    parts.push_back({.n = rows, .source = weights.back()->source});
    if (seed % 2) parts.back().bias = biases.back().data();
    n += rows;
  }
};

std::shared_ptr<Linear> make_linear(const ktk_format& given, const std::string& variant,
                                    int threads, int shards, size_t rows = kRows) {
  auto linear = empty_linear(depth(given), rows, variant, threads, shards);
  Parts parts;
  parts.add(given, rows, depth(given));
  linear->load(parts.parts);
  return linear;
}

// Arrays of a call, of exactly the size they need.
struct Call {
  std::vector<uint16_t> x;
  std::vector<float> out;
  size_t tokens, k, n;

  Call(const Linear& linear, size_t count)
      : x(random_bf16(count * linear.k(), 1.0f, 99)),
        out(count * linear.n(), NAN),
        tokens(count),
        k(linear.k()),
        n(linear.n()) {}

  void run(Linear& linear) {
    linear.forward({x.data(), KTK_BF16, k}, {out.data(), KTK_F32, n}, tokens);
  }
  bool same_row(size_t row, const Call& other, size_t at) const {
    return !std::memcmp(&out[row * n], &other.out[at * n], n * sizeof(float));
  }
};

void check_call(Linear& linear, size_t tokens, const std::vector<float>& bias) {
  Call call(linear, tokens);
  call.run(linear);
  std::vector<float> weight(call.n * call.k);
  linear.weights()->unpack(weight.data());
  double error = 0, size = 0;
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t n = 0; n < call.n; ++n) {
      double y = bias.empty() ? 0 : bias[n];
      for (size_t k = 0; k < call.k; ++k) {
        y += double{to_f32(call.x[t * call.k + k])} * weight[n * call.k + k];
      }
      error += (call.out[t * call.n + n] - y) * (call.out[t * call.n + n] - y);
      size += y * y;
    }
  }
  CHECK(error <= 0.01 * size);
}

TEST(layers_compute_what_they_hold) {
  for (const ktk_format& given : kGiven) {
    for (const std::string& variant : runnable()) {
      for (const int shards : {1, 2, 3}) {
        const auto linear = make_linear(given, variant, 3, shards);
        CHECK_EQ(linear->shards(), static_cast<size_t>(shards));
        for (const size_t tokens : {0, 1, 4, 5, 70}) check_call(*linear, tokens, {});
      }
    }
  }
}

TEST(parts_are_stored_as_each_of_them_is) {
  size_t k = 150;
  for (const ktk_format& given : kGiven) {
    if (ktk::is_ggml(given.element)) k = std::max(k, ktk::block_of(given.element).columns);
  }
  if (ktk::is_ggml(kGiven[0].element)) k = ktk::round_up(k, 256);
  Parts parts;
  for (const ktk_format& given : kGiven) parts.add(given, 40 + parts.n % 7, k);
  parts.add(kGiven[0], 1, k);
  std::vector<float> bias;
  for (const ktk::DensePart& part : parts.parts) {
    bias.insert(bias.end(), part.n, part.bias ? *part.bias : 0.0f);
  }
  for (const std::string& variant : runnable()) {
    for (const int shards : {1, 2}) {
      const auto linear = empty_linear(k, parts.n, variant, 3, shards);
      linear->load(parts.parts);
      CHECK_EQ(linear->weights()->formats().size(), std::size(kGiven) + 1);
      for (const size_t tokens : {3, 40}) {
        check_call(*linear, tokens, bias);
        Call together(*linear, tokens);
        together.run(*linear);
        size_t column = 0;
        for (const ktk::DensePart& part : parts.parts) {
          const auto one = empty_linear(k, part.n, variant, 1, 1);
          one->load({part});
          Call alone(*one, tokens);
          alone.run(*one);
          for (size_t t = 0; t < tokens; ++t) {
            CHECK(!std::memcmp(&together.out[t * parts.n + column], &alone.out[t * part.n],
                               part.n * sizeof(float)));
          }
          column += part.n;
        }
      }
    }
  }
}

TEST(bits_depend_on_neither_workers_nor_rows_beside) {
  for (const ktk_format& given : kGiven) {
    for (const std::string& variant : runnable()) {
      // So few columns that rows are divided, too; and more of them.
      for (const size_t rows : {size_t{3}, kRows}) {
        const auto linear = make_linear(given, variant, 4, 1, rows);
        Call together(*linear, 90), few(*linear, 3);
        together.run(*linear);
        few.run(*linear);
        Call alone(*linear, 90);
        alone.run(*make_linear(given, variant, 1, 1, rows));
        for (size_t t = 0; t < 90; ++t) CHECK(together.same_row(t, alone, t));
        for (size_t t = 0; t < 3; ++t) CHECK(together.same_row(t, few, t));
      }
    }
  }
}

TEST(more_tokens_than_a_chunk_takes) {
  const auto linear = make_linear(kGiven[0], "", 3, 1, 5);
  Call many(*linear, 4096 + 7), last(*linear, 4096 + 7);
  many.run(*linear);
  last.tokens = 7;
  linear->forward({last.x.data() + 4096 * last.k, KTK_BF16, last.k},
                  {last.out.data(), KTK_F32, last.n}, 7);
  for (size_t t = 0; t < 7; ++t) CHECK(last.same_row(t, many, 4096 + t));
}

TEST(nodes_have_a_shard_each_unless_rows_are_few) {
  const auto engine = ktk::Engine::make({.threads = 4, .cpus = {}, .pin = false}, four_nodes());
  const size_t k = depth(kGiven[0]);
  for (const size_t rows : {20, 70, 300}) {
    Parts parts;
    parts.add(kGiven[0], rows, k);
    parts.add(kGiven[0], 9, k);
    Linear linear(ktk::BackendTable::copy(&kBackend), "", false, k, parts.n, engine, 0);
    CHECK_EQ(linear.shards(), 4u);
    linear.load(parts.parts);
    CHECK_EQ(linear.shards(), std::min<size_t>((rows + 31) / 32, 4));
    std::vector<float> bias(rows, 0.0f);
    bias.insert(bias.end(), 9, 0.5f);
    for (const size_t tokens : {2, 33}) check_call(linear, tokens, bias);
  }
}

TEST(rows_are_those_of_the_weight) {
  for (const ktk_format& given : kGiven) {
    const auto linear = make_linear(given, "", 3, 2);
    std::vector<float> weight(kRows * linear->k()), out(300 * linear->k());
    linear->weights()->unpack(weight.data());
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < 300; ++i) ids.push_back(i * 7919 % static_cast<int64_t>(kRows));
    linear->look_up(ids, {out.data(), KTK_F32, linear->k()});
    for (size_t i = 0; i < ids.size(); ++i) {
      CHECK(!std::memcmp(&out[i * linear->k()], &weight[static_cast<size_t>(ids[i]) * linear->k()],
                         linear->k() * sizeof(float)));
    }
    for (const int64_t wrong : {int64_t{-1}, static_cast<int64_t>(kRows)}) {
      CHECK_THROWS(std::out_of_range, linear->look_up(std::vector<int64_t>{0, wrong},
                                                      {out.data(), KTK_F32, linear->k()}));
    }
  }
}

TEST(a_call_reads_what_it_overwrites_first) {
  const size_t k = depth(kGiven[0]);
  const auto linear = make_linear(kGiven[0], "", 4, 1, k);
  for (const size_t tokens : {2, 50}) {
    Call apart(*linear, tokens);
    apart.run(*linear);
    std::vector<float> both(tokens * k);
    for (size_t i = 0; i < both.size(); ++i) both[i] = to_f32(apart.x[i]);
    linear->forward({both.data(), KTK_F32, k}, {both.data(), KTK_F32, k}, tokens);
    CHECK(both == apart.out);
  }
}

TEST(a_weight_is_replaced_while_others_use_it) {
  const ktk_format& given = kGiven[0];
  const auto linear = make_linear(given, "", 2, 1);
  Call wanted(*linear, 6);
  wanted.run(*linear);
  Parts parts;
  parts.add(given, kRows, linear->k());
  std::atomic<bool> stop = false;
  std::atomic<int> wrong = 0;
  const auto use = [&] {
    while (!stop) {
      Call call(*linear, 6);
      call.run(*linear);
      wrong += call.out != wanted.out;
      wrong += linear->weights()->bytes() == 0;
    }
  };
  std::thread one(use), two(use);
  for (int i = 0; i < 20; ++i) linear->load(parts.parts);
  stop = true;
  one.join();
  two.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST(calls_run_in_the_background) {
  const auto linear = make_linear(kGiven[0], "", 2, 1);
  Call direct(*linear, 9), later(*linear, 9);
  direct.run(*linear);
  ktk::Job job(*linear->engine(), [&] { later.run(*linear); });
  job.wait();
  CHECK(job.done());
  CHECK(later.out == direct.out);
  const auto empty = empty_linear(linear->k(), kRows, "", 2, 1);
  ktk::Job failing(*empty->engine(), [&] { later.run(*empty); });
  for (int i = 0; i < 2; ++i) CHECK_THROWS(std::runtime_error, failing.wait());
}

}  // namespace
