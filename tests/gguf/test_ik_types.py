"""Types of ik_llama.cpp mean what its own decoder says, in files, packed, and as experts.

`ik_blocks.npz` holds three rows of 512 values of each type (normal, heavy-tailed and with
outliers), written by ik_llama.cpp's quantiser and read by its decoder at commit 8337e4cd:
NAME.bytes and NAME.values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_files as files
import numpy as np
import pytest
import torch
from gguf_files import E, H, I
from typer.testing import CliRunner

import ktk
from ktk import Format, _core
from ktk.checkpoint.gguf import GgufCheckpoint
from ktk.cli import app
from ktk.errors import CheckpointError
from ktk.ik_types import TYPES

VECTORS = np.load(Path(__file__).parent / "ik_blocks.npz")
#: What LLAMAFILE multiplies as floats, and the bytes of memory that 256 of its values take.
BYTES_OF_MEMORY = {"iq6_k": 212, "iq1_kt": 76, "iq2_kt": 76, "iq3_kt": 108, "iq4_kt": 140}
AS_FLOATS = [name for name in TYPES if name in BYTES_OF_MEMORY]
SIZES: dict[str, Any] = {
    "num_experts": E,
    "num_experts_per_tok": files.TOP,
    "hidden_size": H,
    "intermediate_size": I,
}
WITH_PREFIX = [name for name, kind in TYPES.items() if kind.row_prefix]
needs_backend = pytest.mark.skipif(
    not ktk.backends()["LLAMAFILE"].built, reason="LLAMAFILE is not part of this build"
)


def same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", TYPES)
def test_values_are_those_of_ik_llama_cpp(name: str) -> None:
    kind = TYPES[name]
    rows, values = VECTORS[f"{name}.bytes"], VECTORS[f"{name}.values"]
    assert rows.shape == (len(values), kind.row_nbytes(values.shape[1]))
    same_bits(kind.values(kind.blocks_of(rows)), values)


@needs_backend
@pytest.mark.parametrize("name", TYPES)
def test_packed_values_are_those_of_ik_llama_cpp(name: str) -> None:
    backend = ktk.load_backend("LLAMAFILE")
    rows = TYPES[name].blocks_of(VECTORS[f"{name}.bytes"])
    for variant in backend.variants:
        if variant.runnable:
            packed = _core.PackedMatrix(backend.core, variant.name, rows, given=Format(name))
            same_bits(packed.unpack(), VECTORS[f"{name}.values"])


@pytest.mark.parametrize("name", TYPES)
def test_elements_have_the_sizes_of_the_types(name: str) -> None:
    kind, fmt = TYPES[name], Format(name)
    assert fmt == Format(f"ggml:{kind.number}")
    assert (fmt.element, fmt.block, fmt.group_k) == (
        name,
        (kind.columns, kind.nbytes),
        kind.columns,
    )


def layer_of(parts: dict[str, files.Tensor], x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Compute a layer in float64, with weights of one."""
    gate, up, down = (parts[part].values[ids] for part in files.PARTS)
    gated = np.einsum("th,tjih->tji", x, gate)
    inner = gated / (1 + np.exp(-gated)) * np.einsum("th,tjih->tji", x, up)
    sums: np.ndarray = np.einsum("tji,tjhi->th", inner, down)
    return sums


def f32_rows(name: str, n: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make random rows of blocks of a type, and what they mean."""
    made = files.tensor((n, k), name.upper(), seed)
    return TYPES[name].blocks_of(made.data), made.values.astype(np.float32)


@needs_backend
@pytest.mark.parametrize("name", AS_FLOATS)
def test_types_that_int8_would_round_are_multiplied_as_f32(name: str) -> None:
    """The bits of a product with F32, whose blocks are those values: in any tile, over any runs."""
    backend = ktk.load_backend("LLAMAFILE")
    rows, values = f32_rows(name, 70, 5 * 256, 1)
    x = np.random.default_rng(2).standard_normal((29, 5 * 256)).astype(np.float32)
    for variant in backend.variants:
        if variant.runnable:
            packed = _core.PackedMatrix(backend.core, variant.name, rows, given=Format(name))
            as_f32 = _core.PackedMatrix(backend.core, variant.name, values)
            for m in (1, 2, 5, 13, 29):
                same_bits(packed.matmul(x[:m]), as_f32.matmul(x[:m]))


@needs_backend
@pytest.mark.parametrize("name", AS_FLOATS)
def test_dense_layers_multiply_them(name: str) -> None:
    rows, values = f32_rows(name, 70, 512, 3)
    x = torch.from_numpy(np.random.default_rng(4).standard_normal((5, 512)).astype(np.float32))
    results = []
    for data, given in ((rows, name), (values, "f32")):
        linear = ktk.Linear("LLAMAFILE", 512, 70, weight_format=given)
        linear.load(torch.from_numpy(data), given=given)
        results.append(linear(x))
    assert torch.equal(*results)
    # In f32: a chain of 512 sums for each output.
    exact = x.double() @ torch.from_numpy(values).double().T
    size = x.double().abs() @ torch.from_numpy(values).double().abs().T
    assert (
        (results[0].double() - exact).abs() <= 512 * 2.0**-24 / (1 - 512 * 2.0**-24) * size
    ).all()


@needs_backend
@pytest.mark.parametrize("name", AS_FLOATS)
def test_packed_folders_hold_them(tmp_path: Path, name: str) -> None:
    path = files.write(tmp_path / "m.gguf", files.stacked(files.experts(name)))
    shown = CliRunner().invoke(
        app, ["convert", str(path), str(tmp_path / "packed"), "--backend", "LLAMAFILE"]
    )
    assert shown.exit_code == 0, shown.output
    direct, packed = (ktk.MoE.from_checkpoint(p, 0) for p in (path, tmp_path / "packed"))
    assert (packed.backend.name, packed.format) == ("LLAMAFILE", Format(name))
    # Rows of 32 n, a header among 256 of k: as large as the file but for what the types say.
    assert packed.nbytes == direct.nbytes <= BYTES_OF_MEMORY[name] / 256 * (3 * E * I * H)
    for got, wanted in zip(packed.unpack_expert(1), direct.unpack_expert(1), strict=True):
        same_bits(np.asarray(got), np.asarray(wanted))


@needs_backend
@pytest.mark.parametrize("name", TYPES)
def test_layers_of_files_are_computed_in_any_shards(tmp_path: Path, name: str) -> None:
    """Rows of down are cut between blocks, whose scale is at the beginning of the row."""
    parts = files.experts(name)
    path = files.write(tmp_path / "m.gguf", files.stacked(parts))
    rng = np.random.default_rng(3)
    x = rng.standard_normal((7, H)).astype(np.float32)
    ids = np.stack([rng.permutation(E)[: files.TOP] for _ in x])
    exact = layer_of(parts, x.astype(np.float64), ids)
    for shards in (1, 2):
        moe = ktk.MoE.from_checkpoint(path, 0, shards=shards)
        assert (moe.backend.name, moe.format) == ("LLAMAFILE", Format(name))
        for e in range(E):
            for got, part in zip(moe.unpack_expert(e), files.PARTS, strict=True):
                np.testing.assert_array_equal(got, parts[part].values[e])
        got = moe(x, ids, np.ones(ids.shape, np.float32))
        # As for ggml's types (test_ggml.py): three matrices, each of which int8 activations cost
        # no more than 0.012.
        assert np.linalg.norm(got - exact) <= 3**0.5 * 0.012 * np.linalg.norm(exact)
        if name in AS_FLOATS:
            as_f32 = ktk.load_backend(moe.backend.name).moe(
                **SIZES, shards=shards, weight_format="f32"
            )
            as_f32.load(*(parts[part].values.astype(np.float32) for part in files.PARTS))
            same_bits(got, as_f32(x, ids, np.ones(ids.shape, np.float32)))


@pytest.mark.parametrize("name", ["iq4_ks", "iq2_kl", "iq4_k"])
def test_other_backends_get_values(tmp_path: Path, name: str) -> None:
    parts = files.experts(name)
    path = files.write(tmp_path / "m.gguf", files.stacked(parts))
    moe = ktk.MoE.from_checkpoint(path, 0, "BF16")
    for got, part in zip(moe.unpack_expert(1), files.PARTS, strict=True):
        wanted = torch.from_numpy(parts[part].values[1]).float().bfloat16().float().numpy()
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", WITH_PREFIX)
def test_sizes_count_what_the_file_holds(tmp_path: Path, name: str) -> None:
    parts = files.experts(name)
    path = files.write(tmp_path / "m.gguf", files.stacked(parts))
    with GgufCheckpoint(path) as checkpoint:
        layer = checkpoint.layer(0)
        assert layer.nbytes == sum(stack.data.size for stack in parts.values())
        assert checkpoint.tensor_sizes()["blk.0.ffn_down_exps.weight"] == parts["down"].data.size
        pieces = [piece for e in range(E) for piece in layer.pieces(e)]
        assert sum(piece.data.size for piece in pieces) == layer.nbytes
    shown = CliRunner().invoke(app, ["inspect", str(path)])
    assert shown.exit_code == 0, shown.output
    assert name.upper() in shown.output


def test_faults_are_found_in_the_scale_of_a_row(tmp_path: Path) -> None:
    parts = files.experts("iq5_ks")
    parts["up"].data[2, 5, :4] = np.array([np.nan], np.float32).view(np.uint8)
    path = files.write(tmp_path / "m.gguf", files.stacked(parts))
    shown = CliRunner().invoke(app, ["verify", str(path)])
    assert shown.exit_code != 0
    assert "ffn_up_exps.weight" in shown.output
    assert "1 elements that are infinite or not a number" in " ".join(shown.output.split())


def test_sums_of_rows_are_no_floats(tmp_path: Path) -> None:
    """Q8_KV has an integer behind its scale, which may be the bits of a NaN."""
    parts = files.experts("q8_kv")
    parts["up"].data[:, :, 4:8] = np.array([np.nan], np.float32).view(np.uint8)
    path = files.write(tmp_path / "m.gguf", files.stacked(parts))
    shown = CliRunner().invoke(app, ["verify", str(path)])
    assert shown.exit_code == 0, shown.output


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = files.write(tmp_path / "m.gguf", files.stacked(files.experts("iq4_kss")))
    path.write_bytes(path.read_bytes()[: -I * H // 2])
    with pytest.raises(CheckpointError, match="is truncated"):
        GgufCheckpoint(path).layer(0)
