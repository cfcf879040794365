#include "moe/ticket.h"

#include <condition_variable>
#include <cstring>
#include <exception>

#include "core/size.h"
#include "format/elements.h"

namespace ktk {

struct Ticket::State {
  std::shared_ptr<Layer> layer;
  Request request;
  std::vector<char> hidden, ids;
  std::vector<float> weights;
  std::vector<uint8_t> skip;

  const Process process;
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  std::exception_ptr error;

  State(std::shared_ptr<Layer> owner, const Request& from)
      : layer(std::move(owner)), request(from) {
    Choice& choice = request.choice;
    const size_t row = layer->config().hidden * element_bits(request.hidden.type) / 8;
    hidden = copy_rows(from.hidden.data, choice.tokens, row,
                       from.hidden.stride * element_bits(from.hidden.type) / 8);
    request.hidden.data = hidden.data();
    request.hidden.stride = layer->config().hidden;
    const size_t id = choice.ids_64 ? 8 : 4;
    ids = copy_rows(choice.ids, choice.tokens, choice.top_k * id, choice.ids_stride * id);
    choice.ids = ids.data();
    choice.ids_stride = choice.top_k;
    weights.resize(product(choice.tokens, choice.top_k));
    for (size_t t = 0; t < choice.tokens; ++t) {
      std::memcpy(&weights[t * choice.top_k], choice.weights + t * choice.weights_stride,
                  choice.top_k * sizeof(float));
    }
    choice.weights = weights.data();
    choice.weights_stride = choice.top_k;
    skip.assign(from.skip.begin(), from.skip.end());
    request.skip = skip;
  }

  static std::vector<char> copy_rows(const void* data, size_t rows, size_t bytes, size_t stride) {
    std::vector<char> copy(product(rows, bytes));
    for (size_t r = 0; r < rows; ++r) {
      std::memcpy(&copy[r * bytes], static_cast<const char*>(data) + r * stride, bytes);
    }
    return copy;
  }

  void run() {
    try {
      layer->forward(request);
    } catch (...) {
      error = std::current_exception();
    }
    // The layer may be the last owner of the engine that runs this; it must not wait for the
    // ticket.
    layer.reset();
    const std::lock_guard lock(mutex);
    done = true;
    ended.notify_all();
  }

  void wait() {
    process.check();
    std::unique_lock lock(mutex);
    ended.wait(lock, [&] { return done; });
  }

  bool has_ended() {
    process.check();
    const std::lock_guard lock(mutex);
    return done;
  }
};

Ticket::Ticket(std::shared_ptr<Layer> layer, const Request& request)
    : state_(std::make_shared<State>(layer, request)) {
  layer->engine()->enqueue([state = state_] { state->run(); });
}

Ticket::~Ticket() {
  if (state_->process.here()) {
    state_->wait();
  } else {
    // A condition variable that the parent's threads wait for cannot be destroyed either.
    static_cast<void>(new std::shared_ptr<State>(std::move(state_)));
  }
}

void Ticket::wait() const {
  state_->wait();
  if (state_->error) std::rethrow_exception(state_->error);
}

bool Ticket::done() const { return state_->has_ended(); }

}  // namespace ktk
