#include "moe/engine.h"

#include <cfenv>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "core/signals.h"

namespace ktk {

Engine::Engine(const WorkerPool::Options& options, const Topology& topology)
    : pool(options, topology), scratch(pool.size()) {}

std::shared_ptr<Engine> Engine::make(const WorkerPool::Options& options, const Topology& topology) {
  return {new Engine(options, topology), [process = Process()](Engine* engine) {
            if (!process.here()) return;
            if (engine->server_.get_id() == std::this_thread::get_id()) {
              try {
                std::thread([engine] { delete engine; }).detach();
              } catch (const std::system_error&) {
                // Without another thread nobody can free it.
              }
            } else {
              delete engine;
            }
          }};
}

Engine::~Engine() {
  {
    std::lock_guard lock(queue_mutex_);
    stopping_ = true;
  }
  queue_changed_.notify_one();
  if (server_.joinable()) server_.join();
}

std::unique_lock<std::mutex> Engine::turn() {
  process_.check();
  return std::unique_lock(busy_);
}

void Engine::enqueue(std::function<void()> job) {
  process_.check();
  {
    std::lock_guard lock(queue_mutex_);
    if (!server_.joinable()) start_server();
    queue_.push_back(std::move(job));
  }
  queue_changed_.notify_one();
}

void Engine::start_server() {
  const BlockSignals block;
  try {
    server_ = std::thread(&Engine::serve, this);
  } catch (const std::system_error& error) {
    throw std::runtime_error("the system starts no thread for calls that nobody waits for (" +
                             error.code().message() + "): raise the limits (ulimit -u, pids.max)");
  }
}

void Engine::serve() {
  std::fesetenv(FE_DFL_ENV);  // not its maker's
  std::unique_lock lock(queue_mutex_);
  for (;;) {
    queue_changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::function<void()> job = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    job();
    job = nullptr;  // what the job holds goes before the next one starts
    lock.lock();
  }
}

}  // namespace ktk
