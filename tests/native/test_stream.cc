// Calls that threads and streams start in any order, with the stub of the CUDA driver: nothing is
// lost, mixed up or, under the thread sanitizer, touched by two threads at once.
//
// The build passes -DKTK_VARIANTS as to the bf16 backend's module, links the stub, and names it in
// KTK_CUDA_LIBRARY.
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cfenv>
#include <cmath>
#include <deque>
#include <future>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "ktk/variants.h"
#include "moe/layer.h"
#include "stream/call.h"
#include "stream/write_expert.h"

extern "C" {
void* stub_stream();
int stub_synchronize(void* stream);
void stub_begin_capture(void* stream);
void* stub_end_capture(void* stream);
int stub_replay(const void* graph, void* stream);
void stub_destroy_graph(void* graph);
void stub_destroy(void* stream);
}

namespace {

using ktk::AsyncCall;
using ktk::Carry;
using ktk::Latch;
using ktk::Layer;

constexpr const ktk_variant* kVariants[] = {KTK_VARIANT_ADDRESSES};
constexpr ktk_format kFormats[] = {{KTK_BF16, KTK_NONE, KTK_NONE, 0, 0}};
constexpr ktk_format kBf16 = kFormats[0];
constexpr ktk_accept kAccepts[] = {{kBf16, 0}};
constexpr ktk_backend kBackend = ktk::make_backend("bf16", kFormats, kAccepts, kVariants);
constexpr size_t kExperts = 4, kTopK = 2, kIntermediate = 32;

std::shared_ptr<ktk::Engine> engine() {
  static const auto one = ktk::Engine::make({.threads = 2, .cpus = {}, .pin = false});
  return one;
}

std::shared_ptr<Layer> empty_layer(const ktk_backend& backend, size_t hidden) {
  const ktk::Config config = {
      kExperts, kTopK, hidden, kIntermediate, {KTK_SILU, 1.0f, INFINITY, false, 0, 0}};
  return std::make_shared<Layer>(ktk::BackendTable::copy(&backend), "", false, config, engine(), 1,
                                 ktk::Parts<std::optional<ktk_format>>{});
}

void load(Layer& layer, size_t expert, std::mt19937& random, const ktk_format& format = kBf16) {
  std::normal_distribution<float> normal(0, 0.1f);
  const size_t hidden = layer.config().hidden;
  static constexpr float kOne = 1;
  std::vector<uint16_t> all(3 * hidden * kIntermediate);
  for (uint16_t& w : all) w = std::bit_cast<uint32_t>(normal(random)) >> 16;
  const auto matrix = [&](size_t i, size_t k) {
    ktk_source source{};
    source.format = format;
    source.data = &all[i * hidden * kIntermediate];
    source.data_stride = 2 * k;
    if (format.scale == KTK_F32) source.scale = &kOne;
    return source;
  };
  ktk::ExpertSource source;
  source.gate = matrix(0, hidden);
  source.up = matrix(1, hidden);
  source.down = matrix(2, kIntermediate);
  layer.load(expert, source);
}

std::shared_ptr<Layer> make_layer(size_t hidden, unsigned seed) {
  auto layer = empty_layer(kBackend, hidden);
  std::mt19937 random(seed);
  for (size_t e = 0; e < kExperts; ++e) load(*layer, e, random);
  return layer;
}

// The arrays of one call.
struct Arrays {
  std::vector<float> hidden, weights, out;
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;
  ktk::Request request;

  explicit Arrays(size_t width, unsigned seed, size_t tokens = 3) : mask(kExperts) {
    hidden.resize(tokens * width);
    out.resize(tokens * width);
    ids.resize(tokens * kTopK);
    weights.resize(tokens * kTopK);
    fill(seed);
    request.hidden = {hidden.data(), KTK_F32, width};
    request.choice = {ids.data(), false, kTopK, weights.data(), kTopK, tokens, kTopK};
    request.out = {out.data(), KTK_F32, width};
    request.skip = mask;
  }

  void fill(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& x : hidden) x = normal(random);
    for (float& w : weights) w = 0.125f * static_cast<float>(random() % 8);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % (kExperts + 2)) - 1;
    // A call that was submitted may be reading another layer's mask right now.
    for (uint8_t& m : mask) std::atomic_ref(m).store(random() % 4 == 0, std::memory_order_relaxed);
  }
};

std::vector<float> direct(const std::shared_ptr<Layer>& layer, unsigned seed) {
  Arrays arrays(layer->config().hidden, seed);
  layer->forward(arrays.request);
  return arrays.out;
}

uintptr_t handle(void* stream) { return reinterpret_cast<uintptr_t>(stream); }

std::shared_ptr<AsyncCall> make_call(const std::shared_ptr<Layer>& layer, const Arrays& arrays,
                                     const std::shared_ptr<Latch>& errors,
                                     AsyncCall::Options options = {}) {
  options.name = "layer";
  return std::make_shared<AsyncCall>(layer, arrays.request, options, errors);
}

TEST(queued_jobs_have_a_thread_as_new) {
  std::fesetround(FE_UPWARD);
  const auto one = ktk::Engine::make({.threads = 1, .cpus = {}, .pin = false});
  std::promise<std::pair<int, sigset_t>> found;
  one->enqueue([&found] {
    std::pair<int, sigset_t> now{std::fegetround(), {}};
    pthread_sigmask(SIG_BLOCK, nullptr, &now.second);
    found.set_value(now);
  });
  const auto [rounding, mask] = found.get_future().get();
  std::fesetround(FE_TONEAREST);
  CHECK_EQ(rounding, FE_TONEAREST);
  CHECK_EQ(sigismember(&mask, SIGINT), 1);
  CHECK_EQ(sigismember(&mask, SIGILL), 0);
}

TEST(ten_thousand_random_steps_lose_nothing) {
  constexpr unsigned kSeeds = 16;
  const std::array layers = {make_layer(16, 1), make_layer(40, 2)};
  const std::array<void*, 2> streams = {stub_stream(), stub_stream()};
  const auto errors = std::make_shared<Latch>();
  std::array<std::array<std::vector<float>, kSeeds>, 2> expected;
  for (size_t m = 0; m < 2; ++m) {
    for (unsigned s = 0; s < kSeeds; ++s) expected[m][s] = direct(layers[m], s);
  }
  struct Graph {
    std::unique_ptr<Arrays> arrays;
    std::shared_ptr<AsyncCall> call;
    void* graph;
  };
  std::array<std::array<Graph, 2>, 2> graphs;
  for (size_t m = 0; m < 2; ++m) {
    for (size_t s = 0; s < 2; ++s) {
      Graph& g = graphs[m][s];
      g.arrays = std::make_unique<Arrays>(layers[m]->config().hidden, 0);
      g.call = make_call(layers[m], *g.arrays, errors, {.live = true});
      stub_begin_capture(streams[s]);
      g.call->start_on(handle(streams[s]));
      g.call->wait_on(handle(streams[s]), false);
      g.graph = stub_end_capture(streams[s]);
    }
  }
  struct Flight {
    size_t layer;
    unsigned seed;
    void* stream;  // NULL: on the pool
    std::unique_ptr<Arrays> arrays;
    std::shared_ptr<AsyncCall> call;
  };
  std::deque<Flight> flights;
  size_t finished = 0, replayed = 0, submitted = 0;
  const auto finish = [&] {
    const Flight flight = std::move(flights.front());
    flights.pop_front();
    if (flight.stream) {
      CHECK_EQ(stub_synchronize(flight.stream), 0);
    } else {
      flight.call->wait();
    }
    CHECK(flight.arrays->out == expected[flight.layer][flight.seed]);
    ++finished;
  };

  std::mt19937 random(3);
  for (int step = 0; step < 10000; ++step) {
    const size_t m = random() % 2, at = random() % 3;
    const unsigned seed = random() % kSeeds;
    void* const stream = at < 2 ? streams[at] : nullptr;
    const unsigned what = random() % 8;
    if (what == 0 && stream) {
      Graph& g = graphs[m][at];
      CHECK_EQ(stub_synchronize(stream), 0);
      g.arrays->fill(seed);
      CHECK_EQ(stub_replay(g.graph, stream), 0);
      CHECK_EQ(stub_synchronize(stream), 0);
      CHECK(g.arrays->out == expected[m][seed]);
      ++replayed;
    } else if (what < 5 && flights.size() < 32) {
      auto arrays = std::make_unique<Arrays>(layers[m]->config().hidden, seed);
      auto call = make_call(layers[m], *arrays, errors);
      if (stream) {
        call->start_on(handle(stream));
        call->wait_on(handle(stream), false);
      } else {
        call->start();
      }
      arrays->fill(seed + 1);  // what was submitted was taken
      flights.push_back({m, seed, stream, std::move(arrays), std::move(call)});
      ++submitted;
    } else if (!flights.empty()) {
      finish();
    }
  }
  while (!flights.empty()) finish();
  CHECK_EQ(finished, submitted);
  CHECK(submitted > 3000);
  CHECK(replayed > 500);
  errors->raise();
  for (auto& both : graphs) {
    for (Graph& g : both) {
      g.call->abandon();
      stub_destroy_graph(g.graph);
    }
  }
  for (void* stream : streams) stub_destroy(stream);
}

TEST(a_mask_may_change_while_calls_read_it) {
  const auto layer = make_layer(16, 1);
  const auto errors = std::make_shared<Latch>();
  Arrays arrays(16, 0);
  const auto call = make_call(layer, arrays, errors, {.live = true, .stable = true});
  std::atomic<bool> stop{false};
  std::thread other([&] {
    for (unsigned i = 0; !stop; ++i) {
      std::atomic_ref(arrays.mask[i % kExperts]).store(i % 3 == 0, std::memory_order_relaxed);
    }
  });
  for (int i = 0; i < 500; ++i) {
    call->start();
    call->wait();
  }
  stop = true;
  other.join();
  errors->raise();
}

TEST(a_deferred_half_reads_what_was_given_to_the_call) {
  constexpr size_t kWidth = 16, kTokens = 64;
  const auto layer = make_layer(kWidth, 1);
  const auto errors = std::make_shared<Latch>();
  std::vector<float> sums(kTokens * kWidth);
  const auto carry = std::make_shared<Carry>(sums.data(), kTokens, kWidth);
  const auto later = [&](bool disturb) {
    Arrays arrays(kWidth, 0, kTokens);
    const auto call =
        make_call(layer, arrays, errors, {.stable = true, .deferral = {1, false}, .give = carry});
    call->start();
    call->wait();
    // A stream goes on here: the buffers are the next layer's.
    if (disturb) arrays.fill(1);
    call->wait_all();
    return sums;
  };
  const std::vector<float> expected = later(false);
  for (int i = 0; i < 50; ++i) CHECK(later(true) == expected);
  errors->raise();
}

TEST(experts_may_be_loaded_while_calls_run) {
  for (unsigned round = 0; round < 20; ++round) {
    const auto layer = empty_layer(kBackend, 16);
    const auto errors = std::make_shared<Latch>();
    std::thread other([&] {
      std::mt19937 random(round);
      for (size_t e = 0; e < kExperts; ++e) load(*layer, e, random);
    });
    for (int i = 0; i < 10; ++i) {
      Arrays arrays(16, round);
      const auto call = make_call(layer, arrays, errors);
      call->start();
      call->wait();
      try {
        errors->raise();
      } catch (const std::runtime_error&) {  // some are not loaded yet
      }
    }
    other.join();
    CHECK(direct(layer, round) == direct(make_layer(16, round), round));
  }
}

TEST(without_a_latch_a_wait_throws_until_the_next_start) {
  const auto layer = empty_layer(kBackend, 16);
  Arrays arrays(16, 0);
  const auto call = make_call(layer, arrays, nullptr, {.live = true});
  call->start();
  for (int i = 0; i < 2; ++i) CHECK_THROWS(std::runtime_error, call->wait());
  CHECK_THROWS(std::runtime_error, call->wait_all());
  CHECK(arrays.out == std::vector<float>(arrays.out.size()));
  std::mt19937 random(1);
  for (size_t e = 0; e < kExperts; ++e) load(*layer, e, random);
  call->start();
  call->wait();
  CHECK(arrays.out == direct(layer, 0));
}

TEST(a_call_that_cannot_start_leaves_zeros) {
  const auto layer = make_layer(16, 1);
  Arrays arrays(16, 0);
  arrays.request.choice.top_k = size_t{1} << 46;  // ids that no memory holds a copy of
  std::vector<float> sums(arrays.out.size(), 7.0f);
  std::fill(arrays.out.begin(), arrays.out.end(), 7.0f);
  const auto give = std::make_shared<Carry>(sums.data(), 3, 16);
  const auto call = make_call(layer, arrays, nullptr, {.live = true, .give = give});
  CHECK_THROWS(std::length_error, call->start());
  CHECK(arrays.out == std::vector<float>(arrays.out.size()));
  CHECK(sums == std::vector<float>(sums.size()));
  CHECK(call->done());
  // The host function of a stream tells the latch instead, and the wait behind it ends.
  std::fill(arrays.out.begin(), arrays.out.end(), 7.0f);
  const auto latch = std::make_shared<Latch>();
  const auto later = make_call(layer, arrays, latch, {.live = true});
  void* const stream = stub_stream();
  later->start_on(handle(stream));
  later->wait_on(handle(stream), true);
  CHECK_EQ(stub_synchronize(stream), 0);
  CHECK_THROWS(std::runtime_error, latch->raise());
  CHECK(arrays.out == std::vector<float>(arrays.out.size()));
  CHECK(later->done());
  stub_destroy(stream);
}

TEST(a_call_that_has_ended_holds_no_layer) {
  for (int i = 0; i < 20; ++i) {
    auto layer = make_layer(16, 1);
    const std::weak_ptr<Layer> left = layer;
    Arrays arrays(16, 0);
    const auto call = make_call(layer, arrays, nullptr);
    layer.reset();
    call->start();
    call->wait();
    CHECK(call->done());
    CHECK(left.expired());
    CHECK_THROWS(std::logic_error, call->start());
  }
}

TEST(scales_of_all_rows_have_no_place_in_what_gpus_get) {
  constexpr ktk_format kScaled = {KTK_BF16, KTK_F32, KTK_NONE, 0, 0};
  constexpr ktk_accept kScaledAccept = {kScaled, 0};
  ktk_backend backend = kBackend;
  backend.formats = &kScaled;
  backend.accepts = &kScaledAccept;
  const auto layer = empty_layer(backend, 16);
  std::mt19937 random(1);
  load(*layer, 0, random, kScaled);
  CHECK_THROWS(std::invalid_argument, ktk::check_write(*layer, 0, {{}}, false));
  ktk::check_write(*make_layer(16, 1), 0, {{}}, false);
}

TEST(graphs_of_layers_that_defer_give_the_same_at_every_replay) {
  constexpr size_t kWidth = 16, kTokens = 3, kLayers = 3;
  void* const stream = stub_stream();
  const auto errors = std::make_shared<Latch>();
  std::vector<float> sums(kTokens * kWidth);
  const auto carry = std::make_shared<Carry>(sums.data(), kTokens, kWidth);
  std::vector<std::unique_ptr<Arrays>> arrays;
  std::vector<std::shared_ptr<AsyncCall>> calls;
  for (unsigned n = 0; n < kLayers; ++n) {
    arrays.push_back(std::make_unique<Arrays>(kWidth, n, kTokens));
    AsyncCall::Options options{.live = true, .deferral = {1, false}};
    if (n > 0) options.take = carry;
    if (n + 1 < kLayers) options.give = carry;
    calls.push_back(make_call(make_layer(kWidth, n), *arrays.back(), errors, options));
  }
  stub_begin_capture(stream);
  for (const auto& call : calls) {
    call->start_on(handle(stream));
    call->wait_on(handle(stream), false);
  }
  void* const graph = stub_end_capture(stream);
  std::vector<std::vector<float>> first;
  for (int replay = 0; replay < 200; ++replay) {
    CHECK_EQ(stub_replay(graph, stream), 0);
    if (replay % 3 == 0) continue;  // several in a row
    CHECK_EQ(stub_synchronize(stream), 0);
    std::vector<std::vector<float>> outs;
    for (const auto& a : arrays) outs.push_back(a->out);
    if (first.empty()) first = outs;
    CHECK(outs == first);
  }
  CHECK_EQ(stub_synchronize(stream), 0);
  for (const auto& call : calls) call->abandon();
  CHECK_EQ(stub_replay(graph, stream), 0);
  CHECK_EQ(stub_synchronize(stream), 0);
  CHECK_THROWS(std::runtime_error, errors->raise());
  stub_destroy_graph(graph);
  stub_destroy(stream);
}

}  // namespace
