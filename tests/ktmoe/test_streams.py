"""Calls on a stream, with a driver that is none."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import ktmoe_layers as layers
import pytest
import torch
from ktmoe_driver import Stub
from ktmoe_layers import inputs, wrapper

import ktk
from ktk import KTMoEWrapper, _core
from ktk.ktmoe import ModelState, steps


def test_calls_run_in_the_order_of_their_stream(driver: Stub, stream: int) -> None:
    first, second = wrapper(0, seed=1), wrapper(1, seed=2, model=None)
    x, ids, w = inputs(5)
    expected = [layer.forward(x, ids, w) for layer in (first, second)]
    made = []
    for _ in range(20):
        for layer in (first, second):
            layer.submit_forward(x, ids, w, stream)
            made.append(layer.sync_forward(x, stream))
    driver.synchronize(stream)
    for i, out in enumerate(made):
        assert torch.equal(out, expected[i % 2])


def test_inputs_may_be_overwritten_after_submit(driver: Stub, stream: int) -> None:
    layer = wrapper()
    x, ids, w = inputs(5)
    expected = layer.forward(x, ids, w)
    layer.submit_forward(x, ids, w, stream)
    x.zero_()
    ids.fill_(-1)
    layer.gpu_experts_mask.fill_(True)
    out = layer.sync_forward(x, stream)
    driver.synchronize(stream)
    assert torch.equal(out, expected)


def test_a_graph_reads_its_inputs_and_the_mask_at_every_replay(driver: Stub, stream: int) -> None:
    layer, reference = wrapper(), wrapper()
    x, ids, w = inputs(4)
    driver.begin_capture(stream)
    layer.submit_forward(x, ids, w, stream)
    out = layer.sync_forward(x, stream)
    graph = driver.end_capture(stream)
    out.fill_(7)
    time.sleep(0.02)
    assert (out == 7).all(), "nothing runs while a stream is captured"
    for step in range(5):
        for old, new in zip((x, ids, w), inputs(4, seed=step), strict=True):
            old.copy_(new)
        mask = torch.rand(layers.E) < 0.3
        layer.gpu_experts_mask.copy_(mask)
        reference.gpu_experts_mask.copy_(mask)
        driver.replay(graph, stream)
        driver.synchronize(stream)
        assert torch.equal(out, reference.forward(x, ids, w))


def test_a_graph_of_several_layers_defers_experts(driver: Stub, stream: int) -> None:
    def chain(handle: int) -> list[torch.Tensor]:
        outs = [layer.forward(x, ids, w, handle) for layer in deep]
        last = deep[-1].flush(handle)
        assert last is not None
        return [*outs, last]

    deep = [wrapper(n, seed=n, max_deferred_experts_per_token=1) for n in range(3)]
    x, ids, w = inputs(6)
    driver.begin_capture(stream)
    captured = chain(stream)
    graph = driver.end_capture(stream)
    for seed in range(4):
        for old, new in zip((x, ids, w), inputs(6, seed=seed), strict=True):
            old.copy_(new)
        driver.replay(graph, stream)
        driver.synchronize(stream)
        for replayed, eager in zip(captured, chain(0), strict=True):
            assert torch.equal(replayed, eager)


def test_an_error_is_kept_for_the_next_call(driver: Stub, stream: int) -> None:
    layer = wrapper()
    layer.moe = ktk.load_backend("BF16").moe(  # nothing is loaded
        num_experts=layers.E,
        num_experts_per_tok=layers.K,
        hidden_size=layers.H,
        intermediate_size=layers.INNER,
    )
    x, ids, w = inputs(2)
    driver.begin_capture(stream)
    layer.submit_forward(x, ids, w, stream)
    out = layer.sync_forward(x, stream)
    graph = driver.end_capture(stream)
    out.fill_(7)
    driver.replay(graph, stream)
    driver.synchronize(stream)
    assert not out.any(), "the output of a call that failed is zeros"
    with pytest.raises(RuntimeError, match=r"layer 0: no expert is loaded"):
        layer.submit_forward(x, ids, w, stream)


def test_what_the_driver_refuses_is_raised_in_its_words(driver: Stub, stream: int) -> None:
    layer = wrapper()
    x, ids, w = inputs(2)
    driver.fail_next_launch()
    with pytest.raises(RuntimeError, match=r"cuLaunchHostFunc failed: invalid argument .*error 1"):
        layer.submit_forward(x, ids, w, stream)
    layer.submit_forward(x, ids, w, stream)
    driver.fail_next_launch()
    with pytest.raises(RuntimeError, match="cuLaunchHostFunc failed"):
        layer.sync_forward(x, stream)


def test_a_graph_needs_the_memory_that_its_inputs_live_in(driver: Stub, stream: int) -> None:
    layer = wrapper()
    x, ids, w = inputs(4)
    scattered = torch.empty(2, 4, layers.H).bfloat16()[:, :2]
    driver.begin_capture(stream)
    with pytest.raises(ValueError, match=r"read.* again at every replay"):
        layer.submit_forward(scattered, ids, w, stream)
    with pytest.raises(TypeError, match="topk_weights must be float32"):
        layer.submit_forward(x, ids, w.bfloat16(), stream)
    driver.end_capture(stream)


def test_submit_and_sync_name_the_same_stream(driver: Stub, stream: int) -> None:
    layer = wrapper()
    x, ids, w = inputs(2)
    layer.submit_forward(x, ids, w, stream)
    with pytest.raises(ValueError, match=f"submitted on stream {stream:#x}, .* names 0x0"):
        layer.sync_forward(x, 0)


def test_a_graph_outlives_its_layer_without_harm(driver: Stub, stream: int) -> None:
    x, ids, w = inputs(2)
    layer = wrapper()
    driver.begin_capture(stream)
    layer.forward(x, ids, w, stream)
    graph = driver.end_capture(stream)
    driver.replay(graph, stream)
    driver.synchronize(stream)
    KTMoEWrapper.clear_buffer_cache()
    layer.forward(x, ids, w, stream)  # its own buffers are new
    driver.replay(graph, stream)
    driver.synchronize(stream)
    with pytest.raises(RuntimeError, match="outlived its buffers"):
        layer.forward(x, ids, w)
    del layer
    driver.replay(graph, stream)
    driver.synchronize(stream)


def test_a_graph_says_so_when_weights_were_loaded_again(driver: Stub, stream: int) -> None:
    x, ids, w = inputs(2)
    layer, other = wrapper(), wrapper(1, model=ModelState())
    driver.begin_capture(stream)
    layer.forward(x, ids, w, stream)
    graph = driver.end_capture(stream)
    other.load_weights_from_tensors(*layers.weights(1))  # of another layer
    driver.replay(graph, stream)
    driver.synchronize(stream)
    layer.forward(x, ids, w)
    layer.load_weights_from_tensors(*layers.weights(1))
    driver.replay(graph, stream)
    driver.synchronize(stream)
    with pytest.raises(RuntimeError, match=r"layer 0: .*weights that were loaded again"):
        layer.forward(x, ids, w)
    assert torch.equal(layer.forward(x, ids, w), wrapper(seed=1).forward(x, ids, w))


def test_a_layer_may_go_before_its_stream_gets_there(driver: Stub, stream: int) -> None:
    layer = wrapper()
    x, ids, w = inputs(3)
    expected = layer.forward(x, ids, w)
    outs = [layer.forward(x, ids, w, stream) for _ in range(50)]
    del layer
    driver.synchronize(stream)
    for out in outs:
        assert torch.equal(out, expected)


def test_buffers_between_a_gpu_and_the_workers(
    driver: Stub, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The way of GPU tensors, with copies that end at once, as those of CPU tensors do.
    monkeypatch.setattr(steps, "on_gpu", lambda tensor: True)
    for deferred in (0, 1):
        layer = wrapper(max_deferred_experts_per_token=deferred)
        for tokens in (3, 5, 2):
            x, ids, w = inputs(tokens, seed=tokens)
            layer.submit_forward(x, ids, w.bfloat16(), stream)
            driver.synchronize(stream)
            _core.drain(layer.cpu_infer.pool)
            out = layer.sync_forward(x, stream)
            driver.synchronize(stream)
            reference = wrapper(max_deferred_experts_per_token=deferred)
            assert torch.equal(out, reference.forward(x, ids, w.bfloat16().float()))
            layer.model.reset()


_NO_DRIVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from ktmoe_layers import inputs, wrapper
layer = wrapper()
layer.forward(*inputs(2), 0)
for library in ("/nowhere/libcuda.so.1", "libm.so.6"):
    os.environ["KTK_CUDA_LIBRARY"] = library
    try:
        layer.forward(*inputs(2), 4096)
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.slow
def test_without_a_driver_only_streams_are_missing() -> None:
    command = [sys.executable, "-c", _NO_DRIVER, str(Path(layers.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    missing, other = done.stdout.splitlines()
    assert "cannot be loaded (/nowhere/libcuda.so.1" in missing
    assert "pass stream 0 or None for CPU tensors" in missing
    assert other == "libm.so.6 has no cuInit: it is not a CUDA driver ktk can use"
