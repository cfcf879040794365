"""tools/bench/peer.py: ktk in the runner that times its rivals."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ktk
from ktk import Format
from ktk.bench.accuracy import expected_output
from ktk.bench.inputs import ExpertWeights, random_experts, routed_calls
from ktk.bench.shapes import find_shape
from ktk.quantize import quantize
from ktk.testing.bounds import relative_error
from ktk.testing.formats import as_float64

PEER = Path(__file__).parents[2] / "tools/bench/peer.py"
GGML = runpy.run_path(str(Path(__file__).parents[1] / "gguf/ggml_library.py"))


def test_peer_adapter_registers_without_importing_ktk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KTK_PEERS_DIR", str(tmp_path))
    monkeypatch.delenv("KTK_PEER_BACKENDS", raising=False)
    added: dict[str, str] = {}
    impls = SimpleNamespace(Peer=object, THREADS=1)
    plugin = runpy.run_path(str(PEER))
    plugin["register"](lambda name, venv, cls, fmt, **_: added.update({name: fmt}), impls)
    assert (
        added.items() >= {"ktk/bf16": "bf16", "ktk/fp8": "fp8-b128", "ktk/mxfp8": "mxfp8"}.items()
    )
    monkeypatch.setenv("KTK_PEER_BACKENDS", '{"BF16": ["avx2"]}')
    added.clear()
    plugin["register"](lambda name, venv, cls, fmt, **_: added.update({name: fmt}), impls)
    assert added == {"ktk/bf16": "bf16", "ktk/bf16-avx2": "bf16"}


def simple_peers() -> SimpleNamespace:
    """What the adapter needs of the runner, with its makers of tensors in the plainest form."""

    class Peer:
        def __init__(self, **kw: object) -> None:
            self.__dict__.update(kw)

        def _timed(self, fn):  # type: ignore[no-untyped-def]
            return fn()

    def made(*arguments: object) -> Callable[..., Any]:
        fmt = Format(*arguments)  # type: ignore[arg-type]

        def make(weight: torch.Tensor) -> tuple[Any, Any, Any]:
            q = quantize(weight, fmt)
            return q.data, q.scale, None

        return make

    def q_fp8_row(weight: torch.Tensor) -> tuple[Any, Any, Any]:
        q = quantize(weight, Format("e4m3", "f32", "none", 1, 0))
        return q.data.view(torch.float8_e4m3fn), q.scale.view(-1), None  # type: ignore[union-attr]

    def q_int4(weight: torch.Tensor, group: int) -> tuple[Any, Any]:
        q = quantize(weight, Format("u4", "bf16", "none", 1, group))
        return q.data, q.scale

    def ggml_quantize(_: object, element: int, weight: torch.Tensor) -> torch.Tensor:
        rows = GGML["encode"](weight.float().numpy(), GGML["Type"](element))
        return torch.from_numpy(rows).view(-1)

    types = SimpleNamespace(ktk_type_by_name=lambda name: GGML["Type"][name.decode().upper()])
    return SimpleNamespace(
        Peer=Peer,
        THREADS=1,
        peers_dir=lambda: "",
        ggml_lib=lambda _: types,
        ggml_quantize=ggml_quantize,
        mark_load_start=lambda: None,
        q_int4=q_int4,
        pack_int4_rows=lambda packed: packed,
        q_fp8_block=made("e4m3", "f32", "none", 128, 128),
        q_fp8_row=q_fp8_row,
        q_mxfp4=made("e2m1", "ue8m0", "none", 1, 32),
        q_mxfp8=made("e4m3", "ue8m0", "none", 1, 32),
    )


PLUGIN = runpy.run_path(str(PEER))


@pytest.mark.parametrize("name", PLUGIN["PEERS"])
def test_peer_adapter_runs_a_layer(name: str) -> None:
    backend, peer_format, kind, stored = PLUGIN["PEERS"][name]
    if backend not in ktk.backends():
        pytest.skip(f"{backend} is not installed")
    if kind == "ggml" and GGML["folder"]() is None:
        pytest.skip("pywhispercpp, which has ggml's encoders, is not installed")
    shape = find_shape("tiny")
    experts = random_experts(shape, 2)
    matrices = [(expert.gate, expert.up, expert.down) for expert in experts]
    source = SimpleNamespace(
        E=shape.num_experts, k=shape.num_experts_per_tok, H=shape.hidden_size,
        I=shape.intermediate_size, layers=2, each=lambda fn: [fn(*m) for m in matrices],
    )  # fmt: skip
    peer = PLUGIN["make_peer"](simple_peers())(backend=backend, kind=kind, stored=stored)
    peer.load(source)
    call = routed_calls(shape, 4)[0]
    weights = [ExpertWeights(*peer.dequant(e)) for e in range(2)]
    expected = expected_output(shape, call, lambda e: weights[e % 2])
    arguments = SimpleNamespace(x=call.hidden, ids=call.ids, w=call.weights)
    assert relative_error(as_float64(peer.run(1, arguments)), expected) < 0.03
    assert peer.expert_bytes() >= 0.5 * shape.weights_per_expert
    error = (weights[1].gate - experts[1].gate.float()).norm() / experts[1].gate.float().norm()
    assert error < 0.2
    assert (error == 0) == (peer_format == "bf16")
