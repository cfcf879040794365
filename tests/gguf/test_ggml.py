"""What ggml itself makes of its types, beside what LLAMAFILE makes of them.

ggml's library encodes weights, K-quants and codebooks included, which the gguf package cannot. Its
`ggml_mul_mat_id` is the kernel of llama.cpp: of the same weights and activations both are measured
against the exact product of the decoded weights.
"""

from __future__ import annotations

from pathlib import Path

import ggml_library as ggml
import gguf
import gguf_files as files
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf_files import E, H, I, Tensor

import ktk
from ktk import Format, _core
from ktk.demo import run_demo

if ggml.folder() is None:
    pytest.skip("pywhispercpp, which has ggml's library, is not installed", allow_module_level=True)

BACKEND = ktk.load_backend("LLAMAFILE")
VARIANTS = [variant.name for variant in BACKEND.variants if variant.runnable]
#: ggml's; those of ik_llama.cpp are in test_ik_types.py.
TYPES = [
    Type[name]
    for name in (fmt.element.upper() for fmt in BACKEND.formats)
    if name in Type.__members__
]
BLOCKS = [kind for kind in TYPES if kind.name not in files.PLAIN]
#: What int8 activations with a scale per 32 or 64 may lose of a product (see the backend's README).
KERNEL_ERROR = 0.012
N, K, TOKENS = 96, 1024, 16


def weights(shape: tuple[int, ...], kind: Type, seed: int = 0) -> Tensor:
    """Let ggml encode weights of a trained model's size."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
    return Tensor(ggml.encode(values, kind), kind)


def error(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_mean_what_ggml_decodes(kind: Type) -> None:
    made = weights((33, K), kind)
    fmt = Format(kind.name.lower())
    packed = _core.PackedMatrix(BACKEND.core, VARIANTS[0], made.data, given=fmt)
    np.testing.assert_array_equal(packed.unpack(), ggml.decode(made.data, kind))


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_products_are_no_less_exact_than_ggmls(kind: Type) -> None:
    made = weights((E, N, K), kind)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((TOKENS, K)).astype(np.float32)
    ids = np.stack([rng.permutation(E)[:2] for _ in range(TOKENS)]).astype(np.int32)
    exact = np.einsum("tk,tjnk->tjn", x.astype(np.float64), made.values[ids])
    theirs = error(ggml.expert_products(made.data, kind, x, ids), exact)
    for variant in VARIANTS:
        got = np.empty_like(exact)
        for e in range(E):
            packed = _core.PackedMatrix(
                BACKEND.core, variant, made.data[e], given=Format(kind.name.lower())
            )
            tokens, slots = np.nonzero(ids == e)
            got[tokens, slots] = packed.matmul(np.ascontiguousarray(x[tokens]))
        ours = error(got, exact)
        assert 0 < ours <= KERNEL_ERROR
        # Both round activations to int8 per 32, but ggml keeps the scale as f16; for K-quants and
        # codebooks it has one scale per 256, and here there is one per 64 at most. The hundredth is
        # for ties that fall the other way.
        assert ours <= 1.01 * theirs, f"{variant}: {ours:.5f}, ggml {theirs:.5f}"


def mixed_layers() -> dict[str, Tensor]:
    """Two layers as llama-quantize makes Q4_K_M: Q6_K for down in the first, Q4_K in the second."""
    tensors: dict[str, files.Tensor] = {}
    for layer, down in enumerate((Type.Q6_K, Type.Q4_K)):
        parts = {
            "gate": weights((E, I, H), Type.Q4_K, 10 * layer),
            "up": weights((E, I, H), Type.Q4_K, 10 * layer + 1),
            "down": weights((E, H, I), down, 10 * layer + 2),
        }
        tensors |= files.stacked(parts, layer)
    return tensors


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A model in two files, and what is in them."""
    tensors = mixed_layers()
    folder = tmp_path_factory.mktemp("model")
    first = files.write(folder / "m.gguf", tensors, shard_tensors=4)
    assert len(list(folder.iterdir())) == 2
    return first, tensors


def silu_layer(
    parts: dict[str, np.ndarray], hidden: np.ndarray, ids: np.ndarray, topk_weights: np.ndarray
) -> np.ndarray:
    """Compute a layer in float64 from gate, up and down [E, ...]."""
    gate = np.einsum("th,tjih->tji", hidden, parts["gate"][ids])
    up = np.einsum("th,tjih->tji", hidden, parts["up"][ids])
    inner = gate / (1 + np.exp(-gate)) * up
    sums: np.ndarray = np.einsum("tj,tji,tjhi->th", topk_weights, inner, parts["down"][ids])
    return sums


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layer", [0, 1])
def test_layers_of_mixed_types_run_as_they_are_stored(
    genuine: tuple[Path, dict[str, Tensor]], layer: int, variant: str
) -> None:
    path, tensors = genuine
    parts = {part: tensors[f"blk.{layer}.ffn_{part}_exps.weight"] for part in files.PARTS}
    rng = np.random.default_rng(3)
    hidden = rng.standard_normal((7, H)).astype(np.float32)
    ids = np.stack([rng.permutation(E)[: files.TOP] for _ in hidden])
    topk_weights = rng.random(ids.shape).astype(np.float32)
    values = {part: made.values for part, made in parts.items()}
    exact = silu_layer(values, hidden.astype(np.float64), ids, topk_weights)
    for shards in (1, 2):
        moe = ktk.MoE.from_checkpoint(path, layer, "LLAMAFILE", variant=variant, shards=shards)
        assert (moe.format, moe.up_format) == (Format("q4_k"), Format("q4_k"))
        assert moe.down_format == Format(parts["down"].type.name.lower())
        for e in range(E):
            for got, part in zip(moe.unpack_expert(e), files.PARTS, strict=True):
                np.testing.assert_array_equal(got, values[part][e])
        # Gate, up and down each lose what a product may.
        assert error(moe(hidden, ids, topk_weights), exact) <= 3**0.5 * KERNEL_ERROR


def test_sizes_that_are_no_multiple_of_256_are_those_of_real_files(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite is 1408 wide, so that its Q4_K_M has Q5_0 and Q8_0 for down."""
    width = 1408
    fields = {**files.FIELDS, "expert_feed_forward_length": width}
    for kind in (Type.Q5_0, Type.Q8_0):
        parts = {
            "gate": weights((E, width, H), Type.Q4_K, 1),
            "up": weights((E, width, H), Type.Q4_K, 2),
            "down": weights((E, H, width), kind, 3),
        }
        path = files.write(tmp_path / f"{kind.name}.gguf", files.stacked(parts), fields=fields)
        hidden = np.random.default_rng(4).standard_normal((5, H)).astype(np.float32)
        ids = np.array([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0]])
        topk_weights = np.ones(ids.shape, np.float32)
        values = {part: made.values for part, made in parts.items()}
        exact = silu_layer(values, hidden.astype(np.float64), ids, topk_weights)
        for shards in (1, 2):
            moe = ktk.MoE.from_checkpoint(path, 0, "LLAMAFILE", shards=shards)
            assert moe.down_format == Format(kind.name.lower())
            np.testing.assert_array_equal(moe.unpack_expert(2)[2], values["down"][2])
            assert error(moe(hidden, ids, topk_weights), exact) <= 3**0.5 * KERNEL_ERROR


@pytest.mark.slow
def test_the_demo_runs_genuine_files(
    genuine: tuple[Path, dict[str, Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run_demo(checkpoint=genuine[0], layer=0, names=["LLAMAFILE"])
    assert [row.variant for row in rows] == VARIANTS
    assert all(0 < row.error <= 3**0.5 * KERNEL_ERROR for row in rows)
    assert "Q4_K, Q6_K, in layers 0-1" in capsys.readouterr().out


@pytest.mark.parametrize("name", files.ENCODED)
def test_ggml_and_the_gguf_package_encode_alike(name: str) -> None:
    """Where both can: the library is called as it should be."""
    values = np.random.default_rng(5).standard_normal((8, K)).astype(np.float32)
    wanted = gguf.quants.quantize(values, Type[name])
    np.testing.assert_array_equal(ggml.encode(values, Type[name]), wanted)
