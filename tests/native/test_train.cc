// Backward passes for the sanitizers, as test_layer.cc: memory outside the arrays, races between
// workers. The numbers are the conformance kit's business.
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "check.h"
#include "kernels.h"
#include "moe/layer.h"
#include "train/backward.h"
#include "train/inner_sums.h"
#include "train/linear.h"

namespace {

constexpr size_t kExperts = 5, kTopK = 3, kTokens = 41, kRank = 5, kZeroExperts = 2;
constexpr size_t kHidden = 525, kWidth = 530;

std::shared_ptr<ktk::Engine> engine(int threads) {
  return ktk::Engine::make({.threads = threads, .cpus = {}, .pin = false});
}

// Everything of one backward pass, in arrays of exactly the size it needs.
struct Pass {
  const bool gated;
  const size_t tokens;
  std::vector<uint16_t> hidden = random_bf16(tokens * kHidden, 1, 1);
  std::vector<uint16_t> grad = random_bf16(tokens * kHidden, 1, 2);
  std::vector<int32_t> ids;
  std::vector<float> weights = std::vector<float>(tokens * kTopK, 0.5f);
  std::vector<uint8_t> skip = {0, 0, 0, 1, 0};
  std::vector<uint16_t> kept;
  std::vector<float> out = std::vector<float>(tokens * kHidden, NAN), dx = out;
  std::vector<float> dw = std::vector<float>(tokens * kTopK, NAN);
  std::vector<uint16_t> a_gate = random_bf16(kExperts * kRank * kHidden, 0.1f, 3);
  std::vector<uint16_t> b_gate = random_bf16(kExperts * kWidth * kRank, 0.1f, 4);
  std::vector<uint16_t> a_down = random_bf16(kExperts * kRank * kWidth, 0.1f, 5);
  std::vector<uint16_t> b_down = random_bf16(kExperts * kHidden * kRank, 0.1f, 6);
  std::vector<std::vector<float>> sums;
  ktk::Lora lora;

  explicit Pass(bool has_gate, size_t count = kTokens) : gated(has_gate), tokens(count) {
    kept.resize(tokens * kTopK * (gated ? 2 : 1) * (kWidth + 2 * kRank));
    for (size_t i = 0; i < tokens * kTopK; ++i) {
      ids.push_back(static_cast<int32_t>(i * i % (kExperts + kZeroExperts + 2)) - 1);
    }
    ktk::Adapter adapter{.rank = kRank, .scale = 2, .a = {}, .b = {}};
    (gated ? adapter.a.gate : adapter.a.up) = {a_gate.data(), KTK_BF16};
    (gated ? adapter.b.gate : adapter.b.up) = {b_gate.data(), KTK_BF16};
    adapter.a.down = {a_down.data(), KTK_BF16};
    adapter.b.down = {b_down.data(), KTK_BF16};
    lora.adapters.push_back(adapter);
  }

  float* sum(size_t count) { return sums.emplace_back(count, 0.0f).data(); }

  void run(ktk::Layer& layer, bool keep, std::shared_ptr<const ktk::BackendTable> table) {
    const ktk::FloatBackend floats(std::move(table));
    ktk::Request request;
    request.hidden = {hidden.data(), KTK_BF16, kHidden};
    request.choice = {ids.data(), false, kTopK, weights.data(), kTopK, tokens, kTopK};
    request.out = {out.data(), KTK_F32, kHidden};
    request.skip = skip;
    request.lora = &lora;
    request.kept = {kept.data(), KTK_BF16, ktk::kept_columns(layer.config(), &lora)};
    layer.forward(request);
    if (!keep) request.kept = {};
    request.out = {grad.data(), KTK_BF16, kHidden};
    ktk::BackwardRequest backward;
    backward.forward = request;
    backward.hidden_gradient = {dx.data(), KTK_F32, kHidden};
    backward.weights_gradient = dw.data();
    backward.lora.a.down = sum(a_down.size());
    backward.lora.b.down = sum(b_down.size());
    (gated ? backward.lora.a.gate : backward.lora.a.up) = sum(a_gate.size());
    (gated ? backward.lora.b.gate : backward.lora.b.up) = sum(b_gate.size());
    constexpr size_t kSome = 2;
    backward.weights.first = kExperts - kSome;
    backward.weights.count = kSome;
    const auto of_gate = [&](size_t count) { return gated ? sum(kSome * count) : nullptr; };
    backward.weights.weight = {of_gate(kWidth * kHidden), sum(kSome * kWidth * kHidden),
                               sum(kSome * kWidth * kHidden)};
    backward.weights.bias = {of_gate(kWidth), sum(kSome * kWidth), sum(kSome * kHidden)};
    ktk::backward(layer, floats, backward);
  }
};

std::shared_ptr<ktk::Layer> layer_of(int threads, int shards, bool gated, bool on_input,
                                     const std::shared_ptr<ktk::BackendTable>& table) {
  const ktk::Config config = {
      kExperts, kTopK,    kHidden,     kWidth, {KTK_SILU, 1.0f, INFINITY, false, 0, 0},
      gated,    on_input, kZeroExperts};
  auto layer = std::make_shared<ktk::Layer>(table, "", false, config, engine(threads), shards,
                                            ktk::Parts<std::optional<ktk_format>>{});
  const std::vector<float> bias(kWidth, 0.25f);
  for (unsigned e = 0; e < kExperts; ++e) {
    const Weight gate(kGiven[0], kWidth, kHidden, 3 * e), up(kGiven[0], kWidth, kHidden, 3 * e + 1);
    const Weight down(kGiven[0], kHidden, kWidth, 3 * e + 2);
    ktk::ExpertSource source{{gated ? gate.source : up.source, up.source, down.source}};
    source.up_bias = source.down_bias = bias.data();
    if (gated) source.gate_bias = bias.data();
    layer->load(e, source);
  }
  return layer;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(backward_stays_inside_its_arrays_and_has_one_result) {
  constexpr struct {
    int shards;
    bool gated, on_input;
  } kKinds[] = {{1, true, false}, {3, true, true}, {1, false, true}, {3, false, false}};
  for (const auto& [shards, gated, on_input] : kKinds) {
    // Of another table, whose weights are decoded like any, and of the layer's own, whose packed
    // weights are transposed: the same numbers.
    const auto table = ktk::BackendTable::copy(&kBackend);
    Pass first(gated);
    first.run(*layer_of(1, shards, gated, on_input, table), true,
              ktk::BackendTable::copy(&kBackend));
    for (const float value : first.dx) CHECK(std::isfinite(value));
    for (const bool keep : {true, false}) {
      Pass other(gated);
      other.run(*layer_of(3, shards, gated, on_input, table), keep, table);
      CHECK(same(other.out, first.out));
      CHECK(same(other.dx, first.dx));
      CHECK(same(other.dw, first.dw));
      for (size_t i = 0; i < first.sums.size(); ++i) CHECK(same(other.sums[i], first.sums[i]));
    }
  }
}

// Rows of an expert are cut into tasks by the number of workers, and into units that have sums of
// their own (train/inner_sums.h). 451 tokens give experts more rows than a task of one worker has.
TEST(tasks_of_many_rows_have_one_result) {
  const auto table = ktk::BackendTable::copy(&kBackend);
  std::vector<Pass> found;
  for (const int threads : {1, 2, 4}) {
    Pass& pass = found.emplace_back(true, size_t{451});
    for (size_t i = 0; i < pass.ids.size(); ++i) {
      pass.ids[i] = static_cast<int32_t>(i * 7 / 2 % (kExperts - 2));
    }
    pass.run(*layer_of(threads, 1, true, false, table), true, table);
    CHECK(same(pass.dx, found[0].dx));
    for (size_t i = 0; i < pass.sums.size(); ++i) CHECK(same(pass.sums[i], found[0].sums[i]));
  }
}

TEST(units_of_rows_are_shared_by_two_workers_and_have_room) {
  for (size_t count = 1; count <= 2000; ++count) {
    const size_t unit = ktk::InnerSums::unit(count);
    const size_t number = ktk::groups_of(count, unit);
    CHECK(1 <= unit && unit <= 64);
    CHECK(count < 16 ? number == 1 : number % 2 == 0);
    // The last one has fewer rows, by less than one for each of the others.
    CHECK(number * unit - count < number);
    for (const size_t before : {0, 1, 63, 64, 100}) {  // rows of three other experts
      const size_t first = ktk::InnerSums::units(before, 3);
      CHECK(first + number <= ktk::InnerSums::units(before + count, 4));
    }
  }
}

// dx is the sum of weights times dy, and the gradient of a weight x . dy: where a token has nothing
// else, in f32 and nothing else.
TEST(gradients_of_zero_experts_are_those_of_the_identity) {
  for (const bool all : {false, true}) {
    Pass pass(true);
    for (size_t t = all ? 0 : 1; t < kTokens; ++t) {
      pass.ids[t * kTopK] = static_cast<int32_t>(kExperts + t % kZeroExperts);
      for (size_t slot = 1; slot < kTopK; ++slot) pass.ids[t * kTopK + slot] = -1;
    }
    if (!all) pass.ids[0] = 0;
    const auto table = ktk::BackendTable::copy(&kBackend);
    pass.run(*layer_of(3, 2, true, true, table), false, table);
    for (size_t t = all ? 0 : 1; t < kTokens; ++t) {
      double dot = 0, size = 0;
      for (size_t n = 0; n < kHidden; ++n) {
        const size_t at = t * kHidden + n;
        const float dy = to_f32(pass.grad[at]);
        CHECK(pass.dx[at] == pass.weights[t * kTopK] * dy);
        const double term = double{dy} * to_f32(pass.hidden[at]);
        dot += term;
        size += std::abs(term);
      }
      // kHidden sums and products.
      CHECK(std::abs(pass.dw[t * kTopK] - dot) <= kHidden * std::ldexp(size, -23));
      for (size_t slot = 1; slot < kTopK; ++slot) CHECK(pass.dw[t * kTopK + slot] == 0);
    }
  }
}

TEST(a_dense_layer_has_a_gradient) {
  constexpr size_t kRows = 531, kColumns = 150, kCount = 300;
  const std::vector<uint16_t> dy = random_bf16(kCount * kRows, 1, 9);
  std::vector<std::vector<float>> found;
  for (const int threads : {1, 3}) {
    auto linear = std::make_shared<ktk::Linear>(ktk::BackendTable::copy(&kBackend), "", false,
                                                kColumns, kRows, engine(threads), 1);
    const Weight weight(kGiven[0], kRows, kColumns, 1);
    linear->load({{.n = kRows, .source = weight.source}});
    std::vector<float>& dx = found.emplace_back(kCount * kColumns, NAN);
    const ktk::FloatBackend floats(ktk::BackendTable::copy(&kBackend));
    ktk::backward(*linear, floats, {const_cast<uint16_t*>(dy.data()), KTK_BF16, kRows},
                  {dx.data(), KTK_F32, kColumns}, kCount);
    for (const float value : dx) CHECK(std::isfinite(value));
  }
  CHECK(same(found[0], found[1]));
}

}  // namespace
