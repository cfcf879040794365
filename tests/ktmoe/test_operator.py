"""The operator "ktk::moe" on CUDA streams, by the driver that is none."""

from __future__ import annotations

import gc

import pytest
import torch
from ktmoe_driver import Stub
from ktmoe_layers import inputs, wrapper

from ktk.hosts import OpLayer
from ktk.hosts.op import _state, on_stream


@pytest.fixture(scope="module")
def layer() -> OpLayer:
    moe = wrapper().moe
    assert moe is not None
    return OpLayer(moe)


def test_a_stream_starts_it_and_waits_for_it(driver: Stub, stream: int, layer: OpLayer) -> None:
    outs, expected = [], []
    for seed in range(5):
        call = inputs(1 + seed, seed=seed)
        expected.append(layer(*call))
        outs.append(on_stream(*call, layer.number, stream))
    driver.synchronize(stream)
    for out, wanted in zip(outs, expected, strict=True):
        assert torch.equal(out, wanted)


def test_a_graph_replays_it_with_new_inputs(driver: Stub, stream: int, layer: OpLayer) -> None:
    call = inputs(3)
    driver.begin_capture(stream)
    out = on_stream(*call, layer.number, stream)
    graph = driver.end_capture(stream)
    for seed in range(3):
        for old, new in zip(call, inputs(3, seed=seed), strict=True):
            old.copy_(new)
        driver.replay(graph, stream)
        driver.synchronize(stream)
        assert torch.equal(out, layer(*call))


def test_packed_weights_go_although_a_graph_captured_them(driver: Stub, stream: int) -> None:
    moe = wrapper().moe
    assert moe is not None
    layer = OpLayer(moe)
    del moe
    driver.begin_capture(stream)
    on_stream(*inputs(3), layer.number, stream)
    graph = driver.end_capture(stream)
    assert layer in _state().captured_calls
    gc.collect()
    before = len(_state().captured_calls)
    del layer
    gc.collect()
    assert len(_state().captured_calls) == before - 1
    driver.replay(graph, stream)
    driver.synchronize(stream)
    with pytest.raises(RuntimeError, match=r"outlived its buffers .*the end of the layer"):
        _state().check()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu(layer: OpLayer) -> None:
    call = inputs(7)
    x, ids, w = call
    out = layer(x.cuda(), ids.cuda(), w.cuda())
    assert out.is_cuda
    assert torch.equal(out.cpu(), layer(*call))
