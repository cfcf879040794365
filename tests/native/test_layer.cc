// Whole layers with the kernels of one backend, for the sanitizers: memory outside the arrays,
// races between workers, undefined arithmetic. The numbers are the conformance kit's business; here
// an error of layout, which is of the order of the result itself, is all that shows.
#include <atomic>
#include <cmath>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "core/size.h"
#include "format/elements.h"
#include "kernels.h"
#include "moe/layer.h"
#include "stream/call.h"

namespace {

using ktk::Layer;

constexpr size_t kExperts = 5, kTopK = 2, kZeroExperts = 2;

// Off every step, and an intermediate size of three shards that begin inside groups of 128; but
// made of whole blocks of ggml's types, and of three of them.
struct Sizes {
  size_t hidden, intermediate;

  explicit Sizes(const ktk_format& given) {
    const size_t step = ktk::is_ggml(given.element) ? ktk::block_of(given.element).columns : 1;
    hidden = ktk::round_up(70, step);
    intermediate = ktk::round_up(530, step);
  }
  ktk::Config config(bool gated = true) const {
    ktk::Config config = {
        kExperts, kTopK, hidden, intermediate, {KTK_SILU, 1.0f, INFINITY, false, 0, 0}, gated};
    config.zero_experts = kZeroExperts;
    return config;
  }
};

std::shared_ptr<Layer> empty_layer(const ktk_format& given, const std::string& variant, int threads,
                                   int shards, bool gated = true) {
  return std::make_shared<Layer>(ktk::BackendTable::copy(&kBackend), variant, false,
                                 Sizes(given).config(gated),
                                 ktk::Engine::make({.threads = threads, .cpus = {}, .pin = false}),
                                 shards, ktk::Parts<std::optional<ktk_format>>{});
}

std::shared_ptr<Layer> make_layer(const ktk_format& given, const std::string& variant, int threads,
                                  int shards, std::optional<ktk_format> given_up = {},
                                  bool gated = true) {
  const Sizes sizes(given);
  auto layer = empty_layer(given, variant, threads, shards, gated);
  for (unsigned e = 0; e < kExperts; ++e) {
    const Weight gate(given, sizes.intermediate, sizes.hidden, 3 * e);
    const Weight up(given_up.value_or(given), sizes.intermediate, sizes.hidden, 3 * e + 1);
    const Weight down(given, sizes.hidden, sizes.intermediate, 3 * e + 2);
    layer->load(e, {gated ? gate.source : up.source, up.source, down.source});
  }
  return layer;
}

// Arrays of a call, of exactly the size they need.
struct Call {
  Sizes sizes;
  std::vector<uint16_t> hidden;
  std::vector<int32_t> ids;
  std::vector<float> weights, out;
  ktk::Request request;

  Call(const ktk_format& given, size_t tokens)
      : sizes(given), hidden(random_bf16(tokens * sizes.hidden, 1.0f, 99)) {
    std::mt19937 random(7);
    for (size_t i = 0; i < tokens * kTopK; ++i) {
      // Some ids are out of range on either side, and mean nobody.
      ids.push_back(static_cast<int32_t>(random() % (kExperts + kZeroExperts + 2)) - 1);
      weights.push_back(0.25f * static_cast<float>(random() % 5));
    }
    out.assign(tokens * sizes.hidden, NAN);
    request.hidden = {hidden.data(), KTK_BF16, sizes.hidden};
    request.choice = {ids.data(), false, kTopK, weights.data(), kTopK, tokens, kTopK};
    request.out = {out.data(), KTK_F32, sizes.hidden};
  }
};

// The weights of all experts: gate, up and down of each.
std::vector<float> weights_of(const Layer& layer) {
  const size_t part = layer.config().hidden * layer.config().intermediate;
  std::vector<float> all(3 * part * kExperts);
  for (size_t e = 0; e < kExperts; ++e) {
    float* const gate = all.data() + 3 * part * e;
    layer.weights()->unpack(e, gate, gate + part, gate + 2 * part);
  }
  return all;
}

// Of the reference alone: nobody else knows these arrays.
[[gnu::no_sanitize("address", "thread", "undefined")]] double dot(const float* a, const float* b,
                                                                  size_t count) {
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += double{a[i]} * b[i];
  return sum;
}

std::vector<double> computed(const std::vector<float>& weights, bool gated, const Call& call) {
  const auto [hidden, intermediate] = call.sizes;
  const ktk::Config config = call.sizes.config(gated);
  const size_t part = hidden * intermediate;
  std::vector<double> out(call.out.size());
  std::vector<float> x(call.hidden.size()), h(intermediate);
  for (size_t i = 0; i < x.size(); ++i) x[i] = to_f32(call.hidden[i]);
  for (size_t i = 0; i < call.ids.size(); ++i) {
    const int32_t id = call.ids[i];
    const float* const row = &x[i / kTopK * hidden];
    double* const to = &out[i / kTopK * hidden];
    if (id >= 0 && id < static_cast<int32_t>(kExperts)) {
      const float* const gate = &weights[3 * part * static_cast<size_t>(id)];
      const float *const up = gate + part, *const down = up + part;
      for (size_t n = 0; n < intermediate; ++n) {
        const double u = dot(row, up + n * hidden, hidden);
        const double g = gated ? dot(row, gate + n * hidden, hidden) : u;
        h[n] = static_cast<float>(g / (1 + std::exp(-g)) * (gated ? u : 1));
      }
      for (size_t n = 0; n < hidden; ++n) {
        to[n] += call.weights[i] * dot(h.data(), down + n * intermediate, intermediate);
      }
    } else if (config.is_zero_expert(id)) {
      for (size_t n = 0; n < hidden; ++n) to[n] += call.weights[i] * double{row[n]};
    }
  }
  return out;
}

// What weights give. Under a sanitizer a reference takes longer than the layer, so results are
// kept.
class Reference {
 public:
  Reference(std::vector<float> weights, bool gated) : weights_(std::move(weights)), gated_(gated) {}
  bool is_of(const std::vector<float>& weights, bool gated) const {
    return weights.size() == weights_.size() && gated == gated_ &&
           !std::memcmp(weights.data(), weights_.data(), weights.size() * sizeof(float));
  }
  const std::vector<double>& of(const Call& call) {
    const auto [at, is_new] = of_tokens_.try_emplace(call.ids.size() / kTopK);
    if (is_new) at->second = computed(weights_, gated_, call);
    return at->second;
  }

 private:
  std::vector<float> weights_;
  bool gated_;
  std::map<size_t, std::vector<double>> of_tokens_;
};

// Most layers hold what the one before held, in another layout or number of shards.
Reference& reference_of(const Layer& layer) {
  static Reference last({}, false);
  std::vector<float> weights = weights_of(layer);
  const bool gated = layer.config().gated;
  if (!last.is_of(weights, gated)) last = Reference(std::move(weights), gated);
  return last;
}

void check_layer(const ktk_format& given, const std::string& variant, int shards,
                 std::optional<ktk_format> given_up = {}, bool gated = true) {
  const auto layer = make_layer(given, variant, 3, shards, given_up, gated);
  Reference& reference = reference_of(*layer);
  for (const size_t tokens : {1, 3, 20, 200}) {
    Call call(given, tokens);
    layer->forward(call.request);
    const std::vector<double>& wanted = reference.of(call);
    double error = 0, size = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      error += (call.out[i] - wanted[i]) * (call.out[i] - wanted[i]);
      size += wanted[i] * wanted[i];
    }
    CHECK(error <= 0.01 * size);
  }
}

TEST(layers_compute_what_they_hold) {
  for (const ktk_format& given : kGiven) {
    for (const std::string& variant : runnable()) {
      for (const int shards : {1, 2, 3}) check_layer(given, variant, shards);
    }
  }
}

TEST(experts_may_have_no_gate) {
  for (const ktk_format& given : kGiven) {
    for (const std::string& variant : runnable()) check_layer(given, variant, 2, {}, false);
  }
}

// The same weights whatever they are cut into, unless a backend chooses scales for each shard.
TEST(shards_hold_what_was_given) {
  for (const ktk_format& given : kGiven) {
    if (given.element == KTK_BF16) continue;
    const Sizes sizes(given);
    std::vector<float> wanted;
    for (const int shards : {1, 2, 3}) {
      const auto layer = make_layer(given, "", 2, shards);
      std::vector<float> all(3 * sizes.hidden * sizes.intermediate);
      float* const first = all.data();
      const size_t step = all.size() / 3;
      layer->weights()->unpack(1, first, first + step, first + 2 * step);
      CHECK_EQ(layer->shards(), static_cast<size_t>(shards));
      CHECK_EQ(layer->weights()->shards().size(), static_cast<size_t>(shards));
      if (wanted.empty()) wanted = all;
      CHECK(all == wanted);
    }
  }
}

TEST(nodes_have_a_shard_each_unless_weights_cannot_be_cut_so_fine) {
  const ktk_format& given = kGiven[0];
  const auto engine = ktk::Engine::make({.threads = 4, .cpus = {}, .pin = false}, four_nodes());
  const size_t block = ktk::is_ggml(given.element) ? ktk::block_of(given.element).columns : 32;
  for (const size_t blocks : {1, 3, 4, 9}) {
    ktk::Config config = Sizes(given).config();
    config.intermediate = blocks * block;
    const auto make = [&](int shards) {
      const auto layer =
          std::make_shared<Layer>(ktk::BackendTable::copy(&kBackend), "", false, config, engine,
                                  shards, ktk::Parts<std::optional<ktk_format>>{});
      CHECK_EQ(layer->shards(), shards ? static_cast<size_t>(shards) : 4u);
      const Weight gate(given, config.intermediate, config.hidden, 0);
      const Weight down(given, config.hidden, config.intermediate, 1);
      layer->load(0, {gate.source, gate.source, down.source});
      return layer;
    };
    CHECK_EQ(make(0)->shards(), std::min<size_t>(blocks, 4));
    if (blocks < 4) CHECK_THROWS(std::invalid_argument, make(4));
    const auto layer = make(0);
    for (size_t e = 1; e < kExperts; ++e) layer->leave_out(e);
    Call call(given, 5);
    layer->forward(call.request);
    for (const float value : call.out) CHECK(std::isfinite(value));
  }
}

TEST(gate_and_up_may_differ) {
  for (const ktk_format& given_up : kGiven) {
    for (const std::string& variant : runnable()) check_layer(kGiven[0], variant, 1, given_up);
  }
}

// Whatever shares the work: x times the sum of two weights that are exact in f32, once.
TEST(zero_experts_return_what_goes_in) {
  const ktk_format& given = kGiven[0];
  const std::string variant = runnable().front();
  constexpr auto kZero = static_cast<int32_t>(kExperts);
  for (const int shards : {1, 3}) {
    const auto layer = make_layer(given, variant, 3, shards);
    // Nobody computes anything; some tokens have experts; nothing is loaded, and nothing wanted.
    for (const auto& made : {layer, layer, empty_layer(given, variant, 3, shards)}) {
      for (const size_t tokens : {1, 3, 5000}) {
        Call call(given, tokens);
        const bool with_others = made == layer && tokens == 3;
        for (size_t t = 0; t < tokens; ++t) {
          call.ids[t * kTopK] = kZero;
          call.ids[t * kTopK + 1] = kZero + (t % 2 ? 1 : 0);
        }
        if (with_others) call.ids[0] = 0;
        made->forward(call.request);
        for (size_t t = with_others ? 1 : 0; t < tokens; ++t) {
          const float weight = call.weights[t * kTopK] + call.weights[t * kTopK + 1];
          for (size_t n = 0; n < call.sizes.hidden; ++n) {
            const size_t at = t * call.sizes.hidden + n;
            CHECK(call.out[at] == weight * to_f32(call.hidden[at]));
          }
        }
      }
    }
  }
}

// Of 16 bits; and what is read is what is written.
TEST(zero_experts_may_write_where_they_read) {
  const ktk_format& given = kGiven[0];
  for (const int shards : {1, 3}) {
    const auto layer = make_layer(given, runnable().front(), 3, shards);
    Call apart(given, 40), in_place(given, 40);
    std::vector<uint16_t> out(apart.hidden.size());
    apart.request.out = {out.data(), KTK_BF16, apart.sizes.hidden};
    in_place.request.out = in_place.request.hidden;
    layer->forward(apart.request);
    layer->forward(in_place.request);
    CHECK(in_place.hidden == out);
  }
}

TEST(a_value_that_is_not_finite_stays_with_its_zero_expert) {
  const ktk_format& given = kGiven[0];
  const auto layer = make_layer(given, runnable().front(), 2, 2);
  Call call(given, 3);
  call.ids = {static_cast<int32_t>(kExperts), -1, 0, 1, static_cast<int32_t>(kExperts), 2};
  call.weights = {1, 1, 1, 1, 0, 1};
  call.hidden[5] = 0x7fc0;  // NaN, of token 0
  layer->forward(call.request);
  for (size_t at = 0; at < call.out.size(); ++at) CHECK(std::isnan(call.out[at]) == (at == 5));
}

TEST(bits_do_not_depend_on_the_number_of_workers) {
  for (const ktk_format& given : kGiven) {
    for (const std::string& variant : runnable()) {
      Call alone(given, 50), together(given, 50);
      make_layer(given, variant, 1, 1)->forward(alone.request);
      make_layer(given, variant, 4, 1)->forward(together.request);
      CHECK(!std::memcmp(alone.out.data(), together.out.data(), alone.out.size() * sizeof(float)));
    }
  }
}

// The weights are made by the first load, and readers may be there before.
TEST(weights_may_be_read_while_another_thread_loads) {
  const ktk_format& given = kGiven[0];
  const Sizes sizes(given);
  const auto layer = empty_layer(given, "", 2, 1);
  const Weight gate(given, sizes.intermediate, sizes.hidden, 0);
  const Weight up(given, sizes.intermediate, sizes.hidden, 1);
  const Weight down(given, sizes.hidden, sizes.intermediate, 2);
  std::atomic<int> readers = 0;
  const auto read = [&] {
    std::vector<float> all(3 * sizes.hidden * sizes.intermediate);
    float* const first = all.data();
    const size_t step = all.size() / 3;
    size_t loaded = 0;
    ++readers;
    while (loaded < kExperts) {
      const Layer::Loaded weights = layer->weights();
      if (!weights) continue;
      const size_t now = weights->bytes() / weights->expert_bytes();
      CHECK(now >= loaded);
      if (now > loaded) weights->unpack(now - 1, first, first + step, first + 2 * step);
      loaded = now;
    }
    return all;
  };
  auto one = std::async(std::launch::async, read), two = std::async(std::launch::async, read);
  while (readers < 2) std::this_thread::yield();
  for (size_t e = 0; e < kExperts; ++e) layer->load(e, {gate.source, up.source, down.source});
  CHECK(one.get() == two.get());
}

std::shared_ptr<ktk::AsyncCall> submit(const std::shared_ptr<Layer>& layer, const Call& call) {
  auto ticket =
      std::make_shared<ktk::AsyncCall>(layer, call.request, ktk::AsyncCall::Options(), nullptr);
  ticket->start();
  return ticket;
}

TEST(tickets_run_in_the_background) {
  const auto layer = make_layer(kGiven[0], runnable().front(), 2, 1);
  Call direct(kGiven[0], 9);
  layer->forward(direct.request);
  std::vector<std::unique_ptr<Call>> calls;
  std::vector<std::shared_ptr<ktk::AsyncCall>> tickets;
  for (int i = 0; i < 8; ++i) {
    calls.push_back(std::make_unique<Call>(kGiven[0], 9));
    tickets.push_back(submit(layer, *calls.back()));
    // The inputs were copied.
    calls.back()->hidden.assign(calls.back()->hidden.size(), 0);
    calls.back()->ids.assign(calls.back()->ids.size(), -1);
  }
  for (int i = 0; i < 8; ++i) {
    tickets[i]->wait();
    CHECK(tickets[i]->done());
    CHECK(calls[i]->out == direct.out);
  }
}

TEST(an_error_in_a_ticket_reaches_its_owner) {
  const auto layer = empty_layer(kGiven[0], "", 2, 1);
  Call call(kGiven[0], 4);
  const auto ticket = submit(layer, call);
  for (int i = 0; i < 2; ++i) CHECK_THROWS(std::runtime_error, ticket->wait());
  CHECK(ticket->done());
  for (const float value : call.out) CHECK_EQ(value, 0.0f);
}

}  // namespace
