"""Layers of methods that are not the checkpoint's: decoded, and packed as if they were floats."""

from __future__ import annotations

from pathlib import Path

import ktmoe_files as files
import pytest
import torch

from ktk import KTMoEWrapper, MoE, load_backend


@pytest.mark.parametrize(
    "kind",
    ["fp8 by blocks", "fp8 by rows", "fp8 by matrix", "mxfp8", "int4 by 32", "mxfp4", "nvfp4"],
)
@pytest.mark.parametrize("method", ["BF16", "AMXINT8"])
def test_quantized_experts_are_loaded_by_methods_of_other_formats(
    method: str, kind: str, tmp_path: Path
) -> None:
    sizes = (files.LAYER, files.E, files.K, files.H, files.INNER)
    layer = KTMoEWrapper(*sizes, method=method, weight_path=files.write(tmp_path / "model", kind))
    layer.load_weights(torch.arange(files.E))
    values = [
        torch.stack([files.read_back(kind, expert, part) for expert in range(files.E)])
        for part in files.PARTS
    ]
    from_floats = KTMoEWrapper(*sizes, method=method)
    from_floats.load_weights_from_tensors(*values)
    x = torch.randn(5, files.H).bfloat16()
    ids = torch.randint(files.E, (5, files.K))
    weights = torch.rand(5, files.K)
    assert torch.equal(layer.forward(x, ids, weights), from_floats.forward(x, ids, weights))


def test_nvfp4_is_a_method_that_keeps_codes_scales_and_factors(tmp_path: Path) -> None:
    sizes = (files.LAYER, files.E, files.K, files.H, files.INNER)
    path = files.write(tmp_path / "model", "nvfp4")
    layer = KTMoEWrapper(*sizes, method="NVFP4", weight_path=path)
    layer.load_weights(torch.arange(files.E))
    x = torch.randn(5, files.H).bfloat16()
    ids = torch.randint(files.E, (5, files.K))
    weights = torch.rand(5, files.K)
    backend = load_backend("NVFP4")
    direct = MoE.from_checkpoint(path, files.LAYER, backend)
    for expert in range(files.E):
        for part, got in zip(files.PARTS, direct.unpack_expert(expert), strict=True):
            assert torch.equal(torch.from_numpy(got), files.read_back("nvfp4", expert, part))
    assert torch.equal(layer.forward(x, ids, weights), direct(x, ids, weights))
