// Calls that run later: what a ticket and KTMoEWrapper are made of.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <future>
#include <memory>
#include <optional>

#include "python/bind.h"
#include "python/call.h"
#include "python/gil.h"
#include "python/job_handle.h"
#include "stream/call.h"
#include "stream/write_expert.h"

namespace ktk {
namespace {

// Python's hold on a call, and on the arrays that it reads and writes.
class CallHandle {
 public:
  CallHandle(std::shared_ptr<AsyncCall> call, std::vector<AnyArray> inputs, AnyOutput out,
             std::vector<nb::object> carries)
      : inputs_(std::move(inputs)),
        out_(std::move(out)),
        carries_(std::move(carries)),
        call_(std::move(call)) {}
  CallHandle(const CallHandle&) = delete;
  CallHandle& operator=(const CallHandle&) = delete;
  ~CallHandle() {
    const Unlocked unlocked;
    call_->abandon();
  }

  void start() { call_->start(); }
  void wait(bool all) { all ? call_->wait_all() : call_->wait(); }
  bool done() const { return call_->done(); }
  void start_on(uintptr_t stream) { call_->start_on(stream); }
  void wait_on(uintptr_t stream, bool all) { call_->wait_on(stream, all); }

 private:
  std::vector<AnyArray> inputs_;
  AnyOutput out_;
  std::vector<nb::object> carries_;
  std::shared_ptr<AsyncCall> call_;
};

void check_carry(const char* name, const std::shared_ptr<Carry>& carry, const Request& request,
                 const Layer& layer) {
  if (!carry) return;
  if (carry->tokens == request.choice.tokens && carry->hidden == layer.config().hidden) return;
  throw nb::value_error((std::string(name) + " has [" + std::to_string(carry->tokens) + ", " +
                         std::to_string(carry->hidden) + "] sums, the call [" +
                         std::to_string(request.choice.tokens) + ", " +
                         std::to_string(layer.config().hidden) + "]")
                            .c_str());
}

CallHandle* make_call(std::shared_ptr<Layer> layer, nb::handle hidden, nb::handle ids,
                      nb::handle weights, nb::handle mask, nb::handle out,
                      std::shared_ptr<Latch> errors, const std::string& name, bool live,
                      bool stable, size_t deferred, bool batch_union, nb::object give_to,
                      nb::object take_from) {
  const Call call(*layer, hidden, ids, weights, mask, out);
  if (!call.converted.empty() && (live || stable)) {
    throw nb::type_error("topk_weights must be float32 where the call reads them later");
  }
  const auto carry_of = [](nb::handle object) {
    return object.is_none() ? nullptr : nb::cast<std::shared_ptr<Carry>>(object);
  };
  std::shared_ptr<Carry> give = carry_of(give_to), take = carry_of(take_from);
  check_carry("give", give, call.request, *layer);
  check_carry("take", take, call.request, *layer);
  // One queue runs both in their order; between two nothing does.
  if (take && take->engine && take->engine != layer->engine().get()) {
    throw nb::value_error(
        "the layer before computes its deferred experts on another pool, perhaps later than this "
        "layer reads them: give layers of a model that defer experts the same cpuinfer_threads and "
        "numa_nodes, or call flush() between them");
  }
  AsyncCall::Options options{name,           live, stable, {deferred, batch_union}, std::move(give),
                             std::move(take)};
  std::shared_ptr<AsyncCall> made;
  {
    const Unlocked unlocked;
    made = std::make_shared<AsyncCall>(std::move(layer), call.request, std::move(options),
                                       std::move(errors));
  }
  std::vector<AnyArray> inputs;
  if (live || stable) inputs = {call.hidden, call.ids, call.weights};
  if (live && call.mask) inputs.push_back(*call.mask);
  return new CallHandle(std::move(made), std::move(inputs), call.out, {give_to, take_from});
}

using Sums = nb::ndarray<float, nb::ndim<2>, nb::c_contig>;

std::shared_ptr<Carry> make_carry(const Sums& sums) {
  check_array("sums", AnyArray(sums), {-1, -1});
  return std::make_shared<Carry>(sums.data(), sums.shape(0), sums.shape(1));
}

using Ids = nb::ndarray<nb::numpy, int64_t, nb::ndim<2>>;

Ids ids_array(std::vector<int64_t> ids, size_t tokens, size_t top_k) {
  auto* kept = new std::vector<int64_t>(std::move(ids));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return {kept->data(), {tokens, top_k}, owner};
}

nb::tuple split(nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> ids,
                nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> weights,
                size_t num_experts, size_t deferred, bool batch_union, size_t zero_experts) {
  const size_t tokens = ids.shape(0), k = ids.shape(1);
  check_aligned("topk_ids", AnyArray(ids));
  check_aligned("topk_weights", AnyArray(weights));
  if (weights.shape(0) != tokens || weights.shape(1) != k) {
    throw nb::value_error("topk_ids and topk_weights have different shapes");
  }
  const Choice choice{ids.data(), true, k, weights.data(), k, tokens, k};
  Config config;
  config.num_experts = num_experts;
  config.zero_experts = zero_experts;
  Halves halves = split_deferred(choice, {deferred, batch_union}, config);
  return nb::make_tuple(ids_array(std::move(halves.now), tokens, k),
                        ids_array(std::move(halves.later), tokens, k));
}

JobHandle* submit_write(std::shared_ptr<Layer> layer, size_t expert,
                        const std::vector<std::array<uintptr_t, 4>>& ranks, bool wide_scales) {
  if (expert >= layer->config().num_experts) {
    throw nb::index_error(("expert " + std::to_string(expert) + " is not one of " +
                           std::to_string(layer->config().num_experts))
                              .c_str());
  }
  std::vector<RankTarget> targets;
  for (const auto& rank : ranks) {
    const auto at = [&](size_t i) { return reinterpret_cast<void*>(rank[i]); };
    targets.push_back({at(0), at(1), at(2), at(3)});
  }
  const Unlocked unlocked;
  check_write(*layer, expert, targets, wide_scales);
  Engine& engine = *layer->engine();
  return new JobHandle(engine, [layer = std::move(layer), expert, targets, wide_scales] {
    write_expert(*layer, expert, targets, wide_scales);
  });
}

}  // namespace

void bind_stream(nb::module_& m) {
  nb::class_<Latch>(m, "Latch", "Keeps the first error of calls that nobody waits for.")
      .def(nb::new_([] { return std::make_shared<Latch>(); }))
      .def("check", &Latch::raise, "Raises RuntimeError if an error was kept, and forgets it.");

  nb::class_<Carry>(m, "Carry",
                    "An array f32 [tokens, hidden] for what one layer leaves to the next.")
      .def(nb::new_(&make_carry), "sums"_a.noconvert(), nb::keep_alive<0, 2>());

  const auto unlocked = nb::call_guard<Unlocked>();
  nb::class_<CallHandle>(
      m, "AsyncCall",
      "A call of a layer that runs later. Its inputs are copied when it is made, unless\n"
      "options say otherwise.")
      .def(nb::new_(&make_call), "layer"_a, "hidden"_a.none(), "topk_ids"_a.none(),
           "topk_weights"_a.none(), "mask"_a.none(), "out"_a.none(), "errors"_a.none() = nb::none(),
           nb::kw_only(), "name"_a = "", "live"_a = false, "stable"_a = false, "deferred"_a = 0,
           "batch_union"_a = false, "give"_a.none() = nb::none(), "take"_a.none() = nb::none())
      .def("start", &CallHandle::start, unlocked, "Queues the call behind others of its pool.")
      .def("wait", &CallHandle::wait, "all"_a = false, unlocked,
           "Waits until the output is written; `all`: until the deferred half has ended, too. "
           "Raises\n"
           "what went wrong unless the call has a latch for errors.")
      .def_prop_ro("done", &CallHandle::done, unlocked, "Whether it was started, and has ended.")
      .def("start_on", &CallHandle::start_on, "stream"_a, unlocked,
           "Lets a CUDA stream start the call; in a capture, at every replay.")
      .def("wait_on", &CallHandle::wait_on, "stream"_a, "all"_a = false, unlocked,
           "Lets a CUDA stream wait for the call.");

  nb::class_<JobHandle>(m, "Job", "Work on a pool's queue.")
      .def("wait", &JobHandle::wait, unlocked, "Waits for its end; raises what went wrong in it.");
  m.def(
      "submit_write", &submit_write, "layer"_a, "expert"_a, "ranks"_a, "wide_scales"_a,
      "Queues writing an expert, as its checkpoint has it, to the addresses (w13, w13_scale, w2,\n"
      "w2_scale) of each GPU.");

  m.def(
      "drain",
      [](std::shared_ptr<Engine> pool) {
        std::promise<void> reached;
        pool->enqueue([&] { reached.set_value(); });
        reached.get_future().wait();
      },
      "pool"_a, unlocked,
      "Waits for what is queued on a pool, whose queue has a thread from then on.");

  m.def(
      "split_deferred", &split, "topk_ids"_a, "topk_weights"_a, "num_experts"_a, "deferred"_a,
      "batch_union"_a = false, "zero_experts"_a = 0,
      "Ids that stay, those of zero experts among them, and ids that are deferred; -1 elsewhere.");
  m.def(
      "stream_is_capturing", [](uintptr_t stream) { return CudaDriver::get().capturing(stream); },
      "stream"_a, unlocked, "Whether a CUDA stream is being captured into a graph.");
  m.def(
      "cuda_library", [] { return CudaDriver::get().path(); },
      "The CUDA driver's library; RuntimeError says why there is none.");
}

}  // namespace ktk
