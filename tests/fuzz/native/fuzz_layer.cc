// A layer whose experts come in any formats and bytes, cut into shards, and calls with any routing.
//
// A refusal is std::invalid_argument. What was loaded computes the same bits for a token alone as
// among others, and holds the same weights however it is cut, unless a backend chooses scales for
// each part.
#include <cmath>
#include <optional>
#include <stdexcept>

#include "input.h"
#include "moe/layer.h"

namespace fuzz {
namespace {

constexpr size_t kExperts = 3;

struct Sizes {
  size_t hidden, intermediate;
};

struct Expert {
  Weight gate, up, down;

  Expert(const ktk::Parts<ktk_format>& given, Sizes sizes, Input& input)
      : gate(given.gate, sizes.intermediate, sizes.hidden, input),
        up(given.up, sizes.intermediate, sizes.hidden, input),
        down(given.down, sizes.hidden, sizes.intermediate, input) {}
  ktk::ExpertSource source() const {
    ktk::ExpertSource all{};
    all.gate = gate.source;
    all.up = up.source;
    all.down = down.source;
    return all;
  }
};

// gate, up and down of an expert, one behind the other. An array that has been used before is not
// cleared: that took as long as to fill it.
void unpack(const ktk::Layer& layer, size_t expert, std::vector<float>& all) {
  const size_t part = layer.config().hidden * layer.config().intermediate;
  if (all.size() < 3 * part) all.resize(3 * part);
  layer.weights()->unpack(expert, all.data(), all.data() + part, all.data() + 2 * part);
}

// Routing and hidden states of some tokens.
struct Call {
  size_t top_k, hidden_size;
  std::vector<int32_t> ids;
  std::vector<float> weights, hidden, out;

  Call(size_t tokens, size_t top_k_, size_t hidden_size_, Input& input)
      : top_k(top_k_),
        hidden_size(hidden_size_),
        ids(tokens * top_k),
        weights(tokens * top_k),
        hidden(tokens * hidden_size),
        out(tokens * hidden_size) {
    for (int32_t& id : ids) id = input.in<int32_t>(-1, kExperts);
    std::string some = input.bytes(400);
    if (some.empty()) some = std::string("\0\0\x80\x3f", 4);
    fill(reinterpret_cast<char*>(hidden.data()), hidden.size() * sizeof(float), some);
    some += '\x3f';
    fill(reinterpret_cast<char*>(weights.data()), weights.size() * sizeof(float), some);
  }
  size_t tokens() const { return ids.size() / top_k; }

  ktk::Request of(size_t token, size_t count, std::vector<float>& to) {
    ktk::Request request;
    request.hidden = {hidden.data() + token * hidden_size, KTK_F32, hidden_size};
    request.choice = {ids.data() + token * top_k,
                      false,
                      top_k,
                      weights.data() + token * top_k,
                      top_k,
                      count,
                      top_k};
    request.out = {to.data() + token * hidden_size, KTK_F32, hidden_size};
    return request;
  }
};

void run(Input& input) {
  static const std::shared_ptr<ktk::Engine> engine =
      ktk::Engine::make({.threads = 1, .cpus = {}, .pin = false});
  const ktk::Variant& v = variant(input);
  ktk::Parts<ktk_format> given = {accept(input).given, accept(input).given, accept(input).given};
  if (input.flag()) given.up = given.down = given.gate;
  const auto block = [](const ktk_format& format) { return ktk::block_of(format.element).columns; };
  const Sizes sizes = {
      ktk::round_up(
          input.in<size_t>(1, 200),
          ktk::common_multiple(2, ktk::common_multiple(block(given.gate), block(given.up)))),
      ktk::round_up(input.in<size_t>(1, 300), ktk::common_multiple(2, block(given.down)))};
  const size_t top_k = input.in<size_t>(1, kExperts);
  const ktk::Config config{
      kExperts, top_k, sizes.hidden, sizes.intermediate, {KTK_SILU, 1.0f, INFINITY, false, 0, 0}};
  const int shards = input.in<int>(1, 3);
  const auto layer_of = [&](int parts) {
    return std::make_unique<ktk::Layer>(table().shared_from_this(), v.name, false, config, engine,
                                        parts, ktk::Parts<std::optional<ktk_format>>{});
  };
  std::unique_ptr<ktk::Layer> layer;
  try {
    layer = layer_of(shards);
  } catch (const std::invalid_argument&) {
    return;  // more shards than columns
  }
  const auto whole = layer_of(1);
  std::vector<uint8_t> skip(kExperts);
  for (size_t e = 0; e < kExperts; ++e) {
    const Expert expert(given, sizes, input);
    try {
      whole->load(e, expert.source());
      layer->load(e, expert.source());
    } catch (const std::invalid_argument&) {
      return;  // these formats do not go with each other, or with so many shards
    }
    if (shards > 1 && ktk::same_format(given.gate, layer->weights()->formats().gate,
                                       sizes.intermediate, sizes.hidden)) {
      static std::vector<float> cut, uncut;
      unpack(*layer, e, cut);
      unpack(*whole, e, uncut);
      require(same(cut.data(), uncut.data(), sizes.intermediate * sizes.hidden),
              "shards of gate hold what was given");
    }
    skip[e] = input.in<int>(0, 5) == 0;
  }
  if (input.flag()) layer->leave_out(input.in<size_t>(0, kExperts - 1));

  Call call(input.in<size_t>(0, 20), top_k, sizes.hidden, input);
  ktk::Request all = call.of(0, call.tokens(), call.out);
  all.skip = skip;
  layer->forward(all);
  std::vector<float> alone(call.out.size());
  for (size_t token = 0; token < call.tokens(); ++token) {
    ktk::Request one = call.of(token, 1, alone);
    one.skip = skip;
    layer->forward(one);
  }
  require(same(alone.data(), call.out.data(), alone.size()),
          "a token has the same bits in any batch");
}

}  // namespace
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  fuzz::Input input(bytes, size);
  fuzz::run(input);
  return 0;
}
