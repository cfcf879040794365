// A call of a layer that runs later. A thread or a CUDA stream starts it, and waits for it.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "moe/layer.h"
#include "stream/deferral.h"
#include "stream/driver.h"
#include "stream/latch.h"

namespace ktk {

// What a layer leaves to the next one: sums in f32, [tokens, hidden], in memory that stays for as
// long as a call that uses it is not abandoned. Like Latch, its reference count is not Python's.
struct Carry : std::enable_shared_from_this<Carry> {
  Carry(float* sums_, size_t tokens_, size_t hidden_)
      : sums(sums_), tokens(tokens_), hidden(hidden_) {}

  float* sums;
  size_t tokens, hidden;
  // Whose queue the sums are computed on; NULL before a call leaves any.
  const Engine* engine = nullptr;

  size_t size() const { return tokens * hidden; }
};

// A call of a layer whose jobs run on the queue of the layer's engine, in the order in which they
// were started, by whichever thread. So a job waits for workers only. A host function of CUDA may
// block the host functions of all streams while it waits for a job, and that is no deadlock: no job
// waits for something that another host function has yet to do.
//
// After an error the output is zeros. The latch keeps the error, or, where there is none, the call
// itself, whose wait() then throws it.
class AsyncCall : public std::enable_shared_from_this<AsyncCall> {
 public:
  struct Options {
    std::string name = {};  // in front of messages
    // Inputs and mask are read at every start instead of now: the call belongs to a graph.
    bool live = false;
    // The memory of the inputs stays as it is from a start to the end of the wait for it.
    bool stable = false;
    Deferral deferral = {};
    std::shared_ptr<Carry> give = nullptr;  // where the deferred half goes; needed if there is one
    std::shared_ptr<Carry> take = nullptr;  // what is added to the result, or none
  };

  // Inputs are copied now, at each start if `live`, or not at all if `stable` (but for a deferred
  // half, which would read them too late). The mask is copied now, or at each start if `live`. The
  // output is written later, and must live until the call has ended or was abandoned. `errors` may
  // be NULL.
  AsyncCall(std::shared_ptr<Layer> layer, const Request& request, Options options,
            std::shared_ptr<Latch> errors);

  // In a child of the process that made the call, everything throws std::logic_error, but for
  // abandon(), which lets the call live for ever.
  //
  // A call that is not live can be started once, and lets go of its layer when it has ended.
  void start();
  // Returns when what was started has written its output; its deferred half may still run. Without
  // a latch it throws, at every wait, what the call threw; a start forgets that.
  void wait();
  // Returns when the deferred half has ended, too.
  void wait_all();
  bool done();
  // The owner of the output is going: waits for what runs, and lets later starts do nothing.
  void abandon();

  // The same from a stream. In a capture, the stream's graph may start the call whenever it is
  // replayed, long after everybody else has forgotten it.
  void start_on(uintptr_t stream);
  void wait_on(uintptr_t stream, bool all);

 private:
  void read_inputs();
  void run();
  void compute_now();
  void compute_later();
  void clear_now();
  void clear_later();
  void release_layer();
  void wait_for(const size_t& count);
  void keep_error(std::exception_ptr error);
  void launch(uintptr_t stream, void (*body)(AsyncCall&));

  const Process process_;
  std::shared_ptr<Layer> layer_;
  const Request given_;
  Request request_;  // given_, or copies of it
  const Options options_;
  const std::shared_ptr<Latch> errors_;

  std::vector<char> hidden_, ids_;
  std::vector<float> weights_;
  std::vector<uint8_t> skip_;

  std::mutex mutex_;
  std::condition_variable changed_;
  size_t started_ = 0, written_ = 0, ended_ = 0;
  std::exception_ptr error_;  // where there is no latch
  bool abandoned_ = false;
};

}  // namespace ktk
