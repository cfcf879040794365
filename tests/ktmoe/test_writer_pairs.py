"""Every method with every file: its own format is written exactly, anything else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ktmoe_files as files
import numpy as np
import pytest
import torch
from ktmoe_buffers import Guarded, wanted

import ktk
from ktk import KTMoEWrapper
from ktk.conversion.convert import convert
from ktk.ktmoe.arguments import warn_once
from ktk.names import KT_WRITTEN

#: The kind of file that each method names; for "RAWINT4" any groups that the backend has.
OWN = {
    "BF16": {"bf16"},
    "FP8": {"fp8 by blocks"},
    "FP8_PERCHANNEL": {"fp8 by rows"},
    "MXFP8": {"mxfp8"},
    "RAWINT4": {"int4 by 32", "int4 by 128", "int4 by 256"},
    "MXFP4": {"mxfp4"},
    "NVFP4": {"nvfp4"},
}
OTHERS = ("AMXINT4", "AMXINT8", "MOE_INT4", "MOE_INT8", "GPTQ_INT4", "LLAMAFILE", "AMXBF16")
REFUSED = r"method {} .*--kt-gpu-prefill-token-threshold"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    return {kind: files.write(folder / kind, kind) for kind in files.KINDS}


def made(method: str, path: Path, **options: Any) -> KTMoEWrapper:
    return KTMoEWrapper(
        files.LAYER,
        files.E,
        files.K,
        files.H,
        files.INNER,
        weight_path=path,
        method=method,
        **options,
    )


def sizes_of(kind: str, ranks: int) -> list[list[int | None]]:
    """Return the sizes that an engine allocates whose own model is this file."""
    parts = files.made(kind)[0]
    cut = [wanted(parts, ranks, rank) for rank in range(ranks)]
    return [[None if part is None else part.size for part in rank] for rank in cut]


@pytest.mark.slow
@pytest.mark.parametrize("kind", files.KINDS)
@pytest.mark.parametrize("method", [*OWN, *OTHERS])
def test_a_method_writes_its_own_format_or_nothing(
    method: str, kind: str, folders: dict[str, Path]
) -> None:
    layer = made(method, folders[kind])
    layer.load_weights()
    for ranks in (1,) if kind == "int4 by 256" else (1, 2):  # whose groups two ranks would cut
        if kind in OWN.get(method, ()):
            for number, parts in enumerate(files.made(kind)):
                buffers = Guarded(sizes_of(kind, ranks))
                layer.submit_write_weight_scale_to_buffer(ranks, number, *buffers.pointers)
                layer.sync_write_weight_scale_to_buffer()
                for rank, got in enumerate(buffers.contents()):
                    for part, expected in zip(got, wanted(parts, ranks, rank), strict=True):
                        assert (part is None) == (expected is None)
                        if part is not None and expected is not None:
                            np.testing.assert_array_equal(part, expected.ravel())
            continue
        # The buffers of an engine that has this file, and of one that has the method's.
        for sizes in {kind, *OWN.get(method, ())}:
            buffers = Guarded(sizes_of(sizes, ranks))
            with pytest.raises(NotImplementedError, match=REFUSED.format(method)):
                layer.submit_write_weight_scale_to_buffer(ranks, 0, *buffers.pointers)
            layer.sync_write_weight_scale_to_buffer()
            assert buffers.untouched()


def test_a_method_has_its_writer_in_any_case(folders: dict[str, Path]) -> None:
    layer = made("mxfp8", folders["mxfp8"])
    layer.load_weights()
    buffers = Guarded(sizes_of("mxfp8", 1))
    layer.submit_write_weight_scale_to_buffer(1, 0, *buffers.pointers)
    layer.sync_write_weight_scale_to_buffer()
    assert not buffers.untouched()


@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("method", OWN)
def test_floats_become_what_the_method_names(
    method: str, kind: str, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    layer = made(method, folders[kind])
    layer.load_weights()
    assert layer.moe is not None
    assert str(layer.moe.format) == str(KT_WRITTEN[method][0])
    assert not [record for record in caplog.records if record.name.startswith("ktk.ktmoe")]


@pytest.mark.parametrize("method", OWN)
def test_a_folder_of_ktk_does_not_say_what_its_checkpoint_held(
    method: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    kind = min(OWN[method])
    convert(folders[kind], tmp_path / "packed", backend=ktk.load_backend(method).name)
    layer = made(method, tmp_path / "packed")
    layer.load_weights()
    buffers = Guarded(sizes_of(kind, 1))
    with pytest.raises(NotImplementedError, match="folder that ktk convert made"):
        layer.submit_write_weight_scale_to_buffer(1, 0, *buffers.pointers)
    assert buffers.untouched()


@pytest.mark.parametrize(
    ("method", "kind", "right"),
    [
        ("FP8", "fp8 by rows", "FP8_PERCHANNEL"),
        ("FP8_PERCHANNEL", "fp8 by blocks", "FP8"),
        ("MXFP8", "fp8 by blocks", "FP8"),
        ("FP8", "mxfp8", "MXFP8"),
    ],
)
def test_a_file_of_another_method_is_named_and_computed(
    method: str,
    kind: str,
    right: str,
    folders: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_once.cache_clear()
    layer = made(method, folders[kind])
    layer.load_weights()
    [said] = [record.message for record in caplog.records if record.name.startswith("ktk.ktmoe")]
    assert said.startswith(f"method {method} means ")
    assert f": method {right}. " in said
    caplog.clear()
    made(right, folders[kind]).load_weights()
    assert not caplog.records
    with pytest.raises(NotImplementedError, match=f"which is method {right}"):
        layer.submit_write_weight_scale_to_buffer(1, 0, [1], [1], [1], [1])


def test_an_expert_that_went_before_its_turn_is_an_error(folders: dict[str, Path]) -> None:
    """Never zeros in the place of its weights."""
    layer = made("mxfp8", folders["mxfp8"], gpu_experts_mask=torch.arange(files.E) == 0)
    written, errors = 0, []
    hidden, ids = torch.zeros(2000, files.H), torch.ones(2000, files.K, dtype=torch.long)
    for _ in range(20):
        layer.load_weights()
        buffers = Guarded(sizes_of("mxfp8", 1))
        # Something that takes its turn first.
        layer.submit_forward(hidden, ids, torch.ones(ids.shape))
        layer.submit_write_weight_scale_to_buffer(1, 0, *buffers.pointers)
        layer.release_gpu_experts()
        try:
            layer.sync_write_weight_scale_to_buffer()
        except ValueError as error:
            layer.sync_forward(hidden)
            errors.append(str(error))
            assert buffers.untouched()
            continue
        layer.sync_forward(hidden)
        assert any(part is not None and part.any() for part in buffers.contents()[0])
        written += 1
    assert written + len(errors) == 20
    assert set(errors) == {"expert 0 is not loaded"}
