"""Calls that overlap, fail or mix streams on the way give right results or an error."""

from __future__ import annotations

import threading

import ktmoe_layers as layers
import pytest
import torch
from ktmoe_driver import Stub
from ktmoe_layers import inputs, wrapper

from ktk import KTMoEWrapper, _core
from ktk.ktmoe import ModelState, steps


def chain(state: ModelState) -> list[KTMoEWrapper]:
    """Make two layers of a model, the first of which defers."""
    return [wrapper(n, seed=n, model=state, max_deferred_experts_per_token=1 - n) for n in range(2)]


def eager(calls: list[layers.Three]) -> list[torch.Tensor]:
    return [layer.forward(*call) for layer, call in zip(chain(ModelState()), calls, strict=True)]


@pytest.mark.parametrize("captured", [False, True])
def test_a_call_may_be_submitted_before_the_last_one_is_asked_for(
    driver: Stub, stream: int, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The way of GPU tensors, with copies that end at once, as those of CPU tensors do.
    monkeypatch.setattr(steps, "on_gpu", lambda tensor: True)
    state = ModelState()
    model = [wrapper(n, seed=n, model=state) for n in range(3)]
    calls = [inputs(4, seed=n) for n in range(3)]
    if captured:
        driver.begin_capture(stream)
    for layer, call in zip(model, calls, strict=True):
        layer.submit_forward(*call, stream)
    submitted = [layer._step for layer in model]
    if captured:
        for layer, call in zip(model, calls, strict=True):
            layer.sync_forward(call[0], stream)
        driver.replay(driver.end_capture(stream), stream)
    driver.synchronize(stream)
    _core.drain(model[0].cpu_infer.pool)
    for n, step in enumerate(submitted):
        assert step is not None
        assert torch.equal(step.out, wrapper(seed=n).forward(*calls[n]))


def test_layers_in_turns_share_buffers(
    driver: Stub, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "on_gpu", lambda tensor: True)
    state = ModelState()
    model = [wrapper(n, seed=n, model=state) for n in range(3)]
    used = set()
    for tokens in (5, 4, 5):
        for layer in model:
            call = inputs(tokens)
            layer.submit_forward(*call, stream)
            assert layer._step is not None
            used.add(layer._step.out.data_ptr())
            layer.sync_forward(call[0], stream)
            driver.synchronize(stream)
    assert len(used) == 1


def test_what_was_deferred_outlives_a_call_that_fails(driver: Stub, stream: int) -> None:
    calls = [inputs(4, seed=n) for n in range(2)]
    expected = eager(calls)
    first, second = chain(ModelState())
    made = [first.forward(*calls[0], stream)]
    driver.fail_next_launch()
    with pytest.raises(RuntimeError, match="cuLaunchHostFunc failed"):
        second.submit_forward(*calls[1], stream)
    made.append(second.forward(*calls[1], stream))
    driver.synchronize(stream)
    for got, wanted in zip(made, expected, strict=True):
        assert torch.equal(got, wanted)


def test_a_call_without_a_stream_cannot_take_what_a_stream_defers(
    driver: Stub, stream: int
) -> None:
    calls = [inputs(4, seed=n) for n in range(2)]
    first, second = chain(ModelState())
    first.forward(*calls[0], stream)
    with pytest.raises(RuntimeError, match="layer 1 was called without a stream, but layer 0 on"):
        second.forward(*calls[1])
    driver.synchronize(stream)
    # The other way round the first call has begun already.
    first.forward(*calls[0])
    result = second.forward(*calls[1], stream)
    driver.synchronize(stream)
    assert torch.equal(result, eager(calls)[1])


def test_flush_names_the_stream_of_the_call(driver: Stub, stream: int) -> None:
    call = inputs(4)
    reference = chain(ModelState())[0]
    reference.forward(*call)
    wanted = reference.flush()
    first, _ = chain(ModelState())
    first.forward(*call, stream)
    with pytest.raises(ValueError, match=f"submitted on stream {stream:#x}, but flush names 0x0"):
        first.flush()
    left = first.flush(stream)
    driver.synchronize(stream)
    assert left is not None
    assert wanted is not None
    assert torch.equal(left, wanted)
    assert first.flush(stream) is None


def test_flush_belongs_into_the_graph_of_the_call(driver: Stub, stream: int) -> None:
    first, _ = chain(ModelState())
    call = inputs(4)
    driver.begin_capture(stream)
    first.forward(*call, stream)
    driver.replay(driver.end_capture(stream), stream)
    with pytest.raises(RuntimeError, match="layer 0 was captured into a graph, and flush has to"):
        first.flush(stream)
    first.model.reset()
    driver.synchronize(stream)
    first.forward(*call, stream)
    driver.begin_capture(stream)
    with pytest.raises(RuntimeError, match="layer 0 was not captured into a graph, and flush"):
        first.flush(stream)
    driver.end_capture(stream)
    assert first.flush(stream) is not None


def test_a_graph_notices_experts_that_were_left_out(driver: Stub, stream: int) -> None:
    mask = torch.arange(layers.E) % 2 == 0
    layer = wrapper(gpu_experts_mask=mask, keep_gpu_experts=False)
    call = inputs(4)
    call[1][0, 0] = 2
    driver.begin_capture(stream)
    out = layer.forward(*call, stream)
    graph = driver.end_capture(stream)
    driver.replay(graph, stream)
    driver.synchronize(stream)
    assert torch.equal(out, wrapper(gpu_experts_mask=mask).forward(*call))
    layer.gpu_experts_mask[2] = False
    driver.replay(graph, stream)
    driver.synchronize(stream)
    assert not out.any(), "the output of a call that failed is zeros"
    layer.gpu_experts_mask[2] = True
    with pytest.raises(RuntimeError, match="layer 0: expert 2 is not loaded"):
        layer.forward(*call)
    assert layer.forward(*call).any()


def test_what_is_converted_cannot_be_read_again_by_a_graph(driver: Stub, stream: int) -> None:
    layer = wrapper()
    x, ids, w = inputs(3)
    result = layer.forward(x, ids.short(), w.double(), stream)
    driver.synchronize(stream)
    assert torch.equal(result, layer.forward(x, ids, w))
    with pytest.raises(TypeError, match=r"hidden_states is torch\.float64: on a stream"):
        layer.forward(x.double(), ids, w, stream)
    driver.begin_capture(stream)
    for call in ((x, ids.short(), w), (x, ids, w.double())):
        with pytest.raises(ValueError, match=r"read.* again at every replay.* converted"):
            layer.submit_forward(*call, stream)
    driver.end_capture(stream)


def test_results_of_other_floats_come_back_from_a_stream(
    driver: Stub, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "on_gpu", lambda tensor: True)
    layer = wrapper()
    x, ids, w = inputs(3)
    layer.submit_forward(x.double(), ids.short(), w.double(), stream)
    driver.synchronize(stream)
    _core.drain(layer.cpu_infer.pool)
    out = layer.sync_forward(x, stream)
    assert out.dtype == torch.float64
    assert torch.equal(out, wrapper().forward(x.double(), ids, w))


def test_streams_do_not_mix_what_they_defer(driver: Stub, stream: int) -> None:
    model, other = chain(ModelState()), driver.stream()
    calls = [[inputs(4, seed=seed), inputs(4, seed=seed + 1)] for seed in (0, 2)]
    stalled, goes_on = threading.Event(), threading.Event()

    def stall() -> None:
        stalled.set()
        goes_on.wait()

    function = driver.host_function(stall)
    made = []
    try:
        for handle, both in zip((stream, other), calls, strict=True):
            for layer, call in zip(model, both, strict=True):
                made.append(layer.forward(*call, handle))
                # The other stream computes both layers between the first one's.
                if len(made) == 1:
                    driver.launch(stream, function)
                    assert stalled.wait(60)
        driver.synchronize(other)
    finally:
        goes_on.set()
    driver.synchronize(stream)
    driver.destroy(other)
    for out, wanted in zip(made, [one for both in calls for one in eager(both)], strict=True):
        assert torch.equal(out, wanted)
