// A call of a layer that runs later.
#pragma once

#include <memory>

#include "moe/layer.h"

namespace ktk {

class Ticket {
 public:
  // Copies hidden, ids, weights and mask of the request and queues the call; only the output is
  // written later, and must live until the ticket is gone.
  Ticket(std::shared_ptr<Layer> layer, const Request& request);
  // Waits for the end of the call, because it writes to memory that goes with the ticket. In a
  // forked child nothing writes, and nothing is waited for.
  ~Ticket();

  // Returns when the call has ended; rethrows what it threw. Throws std::logic_error in a forked
  // child, as done() does.
  void wait() const;
  bool done() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ktk
