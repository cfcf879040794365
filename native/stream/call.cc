#include "stream/call.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <utility>

#include "core/size.h"
#include "ops/select.h"

namespace ktk {
namespace {

void copy_rows(const void* data, size_t rows, size_t bytes, size_t stride, std::vector<char>& to) {
  to.resize(product(rows, bytes));
  for (size_t r = 0; r < rows; ++r) {
    std::memcpy(to.data() + r * bytes, static_cast<const char*>(data) + r * stride, bytes);
  }
}

// Python may write the mask at any time: each byte is read once, as it is then.
void copy_mask(std::span<const uint8_t> mask, std::vector<uint8_t>& to) {
  to.resize(mask.size());
  for (size_t e = 0; e < mask.size(); ++e) {
    to[e] = std::atomic_ref(const_cast<uint8_t&>(mask[e])).load(std::memory_order_relaxed);
  }
}

// Backends may throw anything.
std::string in_words(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "a backend threw a C++ exception that is no std::exception";
  }
}

}  // namespace

AsyncCall::AsyncCall(std::shared_ptr<Layer> layer, const Request& request, Options options,
                     std::shared_ptr<Latch> errors)
    : layer_(std::move(layer)),
      given_(request),
      request_(request),
      options_(std::move(options)),
      errors_(std::move(errors)) {
  if (!options_.live) copy_mask(given_.skip, skip_);
  if (!options_.live && !options_.stable) read_inputs();
  if (options_.give) options_.give->engine = layer_->engine().get();
}

void AsyncCall::read_inputs() {
  const Choice& from = given_.choice;
  Choice& to = request_.choice;
  const Rows& rows = given_.hidden;
  const size_t width = layer_->config().hidden;
  copy_rows(rows.data, from.tokens, rows.bytes_of(width), rows.bytes_of(rows.stride), hidden_);
  request_.hidden = {hidden_.data(), rows.type, width};
  const size_t id = from.ids_64 ? 8 : 4;
  copy_rows(from.ids, from.tokens, from.top_k * id, from.ids_stride * id, ids_);
  to.ids = ids_.data();
  to.ids_stride = from.top_k;
  weights_.resize(product(from.tokens, from.top_k));
  for (size_t t = 0; t < from.tokens; ++t) {
    std::memcpy(&weights_[t * from.top_k], from.weights + t * from.weights_stride,
                from.top_k * sizeof(float));
  }
  to.weights = weights_.data();
  to.weights_stride = from.top_k;
}

void AsyncCall::start() {
  process_.check();
  std::unique_lock lock(mutex_);
  // A graph may be replayed before the deferred half of its last replay has ended.
  changed_.wait(lock, [&] { return ended_ == started_; });
  if (abandoned_) {
    lock.unlock();
    keep_error(std::make_exception_ptr(std::runtime_error(
        "a graph was replayed that outlived its buffers (clear_buffer_cache, the end of the "
        "layer, or weights that were loaded again) and wrote nothing; capture it again")));
    return;
  }
  if (!layer_) throw std::logic_error("a call that is not live can be started once");
  try {
    if (options_.live) copy_mask(given_.skip, skip_);
    // A deferred half reads its inputs after others may have got their memory.
    const bool read = options_.stable ? options_.give != nullptr : options_.live;
    if (read) read_inputs();
    request_.skip = skip_;
    layer_->engine()->enqueue([self = shared_from_this()] { self->run(); });
  } catch (...) {
    // Nobody may take what an earlier call left there for the result of this one.
    clear_now();
    clear_later();
    written_ = ended_ = ++started_;
    throw;
  }
  ++started_;  // not before: what could not be queued would be waited for
  error_ = nullptr;
}

void AsyncCall::clear_now() {
  request_.out.clear(0, request_.choice.tokens, layer_->config().hidden);
}

void AsyncCall::clear_later() {
  if (options_.give) std::fill_n(options_.give->sums, options_.give->size(), 0.0f);
}

void AsyncCall::keep_error(std::exception_ptr error) {
  if (errors_) return errors_->set(options_.name + ": " + in_words(error));
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
}

void AsyncCall::run() {
  try {
    compute_now();
  } catch (...) {
    keep_error(std::current_exception());
    clear_now();
  }
  if (options_.give) {
    {
      const std::lock_guard lock(mutex_);
      ++written_;
    }
    changed_.notify_all();
    try {
      compute_later();
    } catch (...) {
      keep_error(std::current_exception());
      clear_later();
    }
  }
  // What the call holds goes before anybody hears of its end. The layer may be the last owner of
  // the engine that runs this, and goes without the lock, because that may take its time.
  if (!options_.live) release_layer();
  const std::lock_guard lock(mutex_);
  written_ = ++ended_;
  changed_.notify_all();
}

void AsyncCall::release_layer() {
  std::shared_ptr<Layer> layer;
  const std::lock_guard lock(mutex_);
  layer.swap(layer_);
}

void AsyncCall::compute_now() {
  Request request = request_;
  Halves halves;
  if (options_.give) {
    halves = split_deferred(request.choice, options_.deferral, layer_->config());
    request.choice.ids = halves.now.data();
    request.choice.ids_64 = true;
    request.choice.ids_stride = request.choice.top_k;
  }
  if (!options_.take) {
    layer_->forward(request);
    return;
  }
  const size_t width = layer_->config().hidden, tokens = request.choice.tokens;
  std::vector<float> sums(product(tokens, width));
  const Rows out = request.out;
  request.out = {sums.data(), KTK_F32, width};
  layer_->forward(request);
  ops().add(options_.take->sums, sums.size(), sums.data());
  for (size_t t = 0; t < tokens; ++t) {
    ops().from_f32(&sums[t * width], out.type, width, out.at(t));
  }
}

void AsyncCall::compute_later() {
  Request request = request_;
  const Halves halves = split_deferred(request.choice, options_.deferral, layer_->config());
  request.choice.ids = halves.later.data();
  request.choice.ids_64 = true;
  request.choice.ids_stride = request.choice.top_k;
  request.out = {options_.give->sums, KTK_F32, options_.give->hidden};
  layer_->forward(request);
}

void AsyncCall::wait() { wait_for(written_); }
void AsyncCall::wait_all() { wait_for(ended_); }

void AsyncCall::wait_for(const size_t& count) {
  process_.check();
  std::unique_lock lock(mutex_);
  const size_t until = started_;
  changed_.wait(lock, [&] { return count >= until; });
  if (error_) std::rethrow_exception(error_);
}

bool AsyncCall::done() {
  process_.check();
  const std::lock_guard lock(mutex_);
  return started_ > 0 && ended_ == started_;
}

void AsyncCall::abandon() {
  if (!process_.here()) {
    // A condition variable that the parent's threads wait for cannot be destroyed either.
    static_cast<void>(new std::shared_ptr(shared_from_this()));
    return;
  }
  {
    std::unique_lock lock(mutex_);
    abandoned_ = true;
    changed_.wait(lock, [&] { return ended_ == started_; });
  }
  release_layer();
  // Nodes of graphs are kept (launch), and the call with them: copies of its inputs need not be.
  // Assigning {} would keep their memory.
  hidden_ = std::vector<char>();
  ids_ = std::vector<char>();
  weights_ = std::vector<float>();
}

// What a host function throws would end the process.
void AsyncCall::launch(uintptr_t stream, void (*body)(AsyncCall&)) {
  process_.check();
  struct Node {
    std::shared_ptr<AsyncCall> call;
    void (*body)(AsyncCall&);
    bool once;
  };
  const CudaDriver& driver = CudaDriver::get();
  const bool captured = driver.capturing(stream);
  auto node = std::make_unique<Node>(Node{shared_from_this(), body, !captured});
  driver.launch(
      stream,
      [](void* argument) {
        Node* at = static_cast<Node*>(argument);
        try {
          at->body(*at->call);
        } catch (...) {
          at->call->keep_error(std::current_exception());
        }
        if (at->once) delete at;
      },
      node.get());
  if (!captured) {
    node.release();
    return;
  }
  // The driver never says when a graph is gone, so its nodes stay; without its layer, which
  // abandon() lets go, a call is small.
  static std::mutex mutex;
  static std::vector<std::unique_ptr<Node>>& kept = *new std::vector<std::unique_ptr<Node>>;
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(node));
}

void AsyncCall::start_on(uintptr_t stream) {
  launch(stream, [](AsyncCall& call) { call.start(); });
}

void AsyncCall::wait_on(uintptr_t stream, bool all) {
  launch(
      stream,
      all ? [](AsyncCall& call) { call.wait_all(); } : [](AsyncCall& call) { call.wait(); });
}

}  // namespace ktk
