"""The real driver: copies, streams and captured graphs of torch. Skipped where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ktmoe_layers import E, Three, inputs, wrapper

from ktk import KTMoEWrapper

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: the stub driver stands for it here"
)


def on_gpu(tokens: int, seed: int = 0) -> Three:
    x, ids, w = inputs(tokens, seed=seed)
    return x.cuda(), ids.cuda(), w.cuda()


@pytest.fixture
def no_sizes() -> Iterator[None]:
    yield
    KTMoEWrapper.set_capture_batch_sizes([])
    KTMoEWrapper.clear_buffer_cache()


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_calls_run_in_the_order_of_their_stream(side: bool) -> None:
    layer = wrapper()
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    outs, expected = [], []
    for seed in range(20):
        tokens = 1 + seed % 7
        expected.append(layer.forward(*inputs(tokens, seed=seed)))
        call = on_gpu(tokens, seed)
        stream.wait_stream(torch.cuda.current_stream())
        # The current stream is not the one that is named.
        layer.submit_forward(*call, stream.cuda_stream)
        with torch.cuda.stream(stream):
            call[1].fill_(-1)  # as SGLang overwrites the ids, in the order of the stream
        outs.append(layer.sync_forward(call[0], stream.cuda_stream))
    torch.cuda.synchronize()
    for out, wanted in zip(outs, expected, strict=True):
        assert out.is_cuda
        assert torch.equal(out.cpu(), wanted)


def test_the_default_stream_may_be_named_while_another_is_current() -> None:
    layer = wrapper()
    for seed in range(20):
        call = on_gpu(4, seed)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            out = layer.forward(*call, 0)
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), layer.forward(*inputs(4, seed=seed)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_of_a_gpu_that_is_not_the_current_one() -> None:
    layer = wrapper()
    for seed in range(20):
        x, ids, w = (one.to("cuda:1") for one in inputs(4, seed=seed))
        out = layer.forward(x, ids, w)
        assert out.device == x.device
        assert torch.equal(out.cpu(), layer.forward(*inputs(4, seed=seed)))


@pytest.mark.parametrize("deferred", [0, 1])
def test_captured_layers_read_everything_again(deferred: int, no_sizes: None) -> None:
    sizes = [1, 4]
    KTMoEWrapper.set_capture_batch_sizes(sizes)
    layers = [
        wrapper(n, seed=n, max_deferred_experts_per_token=deferred if n < 2 else 0)
        for n in range(3)
    ]
    eager = [
        wrapper(n, seed=n, max_deferred_experts_per_token=deferred if n < 2 else 0)
        for n in range(3)
    ]
    for tokens in sizes:
        x, ids, w = on_gpu(tokens)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm-up
            for layer in layers:
                layer.forward(x, ids, w, stream.cuda_stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            handle = torch.cuda.current_stream().cuda_stream
            outs = [layer.forward(x, ids, w, handle) * 1 for layer in layers]
        for seed in range(5):
            fresh = inputs(tokens, seed=seed)
            for old, new in zip((x, ids, w), fresh, strict=True):
                old.copy_(new)
            mask = torch.rand(E) < 0.3
            for layer in (*layers, *eager):
                layer.gpu_experts_mask.copy_(mask)
            graph.replay()
            torch.cuda.synchronize()
            for out, layer in zip(outs, eager, strict=True):
                assert torch.equal(out.cpu(), layer.forward(*fresh))


def test_what_is_left_is_flushed_to_the_gpu() -> None:
    layer = wrapper(max_deferred_experts_per_token=1)
    stream = torch.cuda.current_stream().cuda_stream
    layer.forward(*on_gpu(3), stream)
    left = layer.flush(stream)
    layer.forward(*inputs(3))
    expected = layer.flush()
    assert left is not None
    assert expected is not None
    assert torch.equal(left.cpu(), expected)
