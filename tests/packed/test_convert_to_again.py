"""`ktk convert --to` may end at any moment, and refuses what it cannot do without a loss."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints as made
import models
import pytest
import torch
from safetensors.torch import load_file, save_file

from ktk.conversion import convert
from ktk.conversion.compressed import CheckpointConversion, convert_checkpoint
from ktk.conversion.compressed.others import other_files
from ktk.durable import locked
from ktk.errors import CheckpointError

HERE = Path(__file__).parent


@pytest.mark.slow
def test_every_call_may_be_the_last(tmp_path: Path) -> None:
    """Dies at each system call that changes a file, resumes, and finds the same bytes."""
    source = made.write(tmp_path / "source", layers=(0, 1), sizes=(2, 64, 96))
    (source / "tokenizer.json").write_text("{}")
    before = made.contents(source)
    done = subprocess.run(
        [sys.executable, HERE / "kill_at.py", source, tmp_path, "nvfp4"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    # Each file takes its room, is written, synced and renamed, and then its folder is synced; the
    # one of weights is written in 4 x 9 tensors and a header.
    small = ("ktk_conversion.json", "tokenizer.json", "config.json", "model.safetensors.index.json")
    assert int(done.stdout) == 5 * len(small) + (4 * 9 + 1) + 4
    assert made.contents(source) == before


def test_bytes_do_not_depend_on_threads(tmp_path: Path) -> None:
    source = models.write(tmp_path / "source")
    for threads in (1, 5):
        convert_checkpoint(source, tmp_path / str(threads), to="mxfp4", threads=threads)
    assert models.contents(tmp_path / "1") == models.contents(tmp_path / "5")


def test_finished_files_are_kept_and_damaged_ones_made_again(tmp_path: Path) -> None:
    source, output = models.write(tmp_path / "source"), tmp_path / "to"
    options: dict[str, Any] = {"to": "int4", "shard_nbytes": 200_000}
    convert_checkpoint(source, output, **options)
    before = models.contents(output)
    shards = sorted(output.glob("*.safetensors"))
    assert len(shards) > 3
    flipped = bytearray(shards[0].read_bytes())
    flipped[-3] ^= 1
    shards[0].write_bytes(flipped)
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    shards[2].unlink()
    (output / "model.safetensors.index.json").unlink()
    stamps = {path: path.stat().st_mtime_ns for path in shards[3:]}
    with CheckpointConversion(source, output, resume=True, **options) as conversion:
        assert [one.done for one in conversion.files] == [False] * 3 + [True] * len(stamps)
        assert not (output / "model.safetensors.index.json").exists()
        for _ in conversion.run():
            pass
    assert models.contents(output) == before
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_what_was_converted_may_be_a_source(tmp_path: Path) -> None:
    """Each folder says what it was begun from itself, not what its source was."""
    source, middle, output = (tmp_path / name for name in ("source", "middle", "to"))
    convert_checkpoint(models.write(source), middle, to="fp8")
    options: dict[str, Any] = {"to": "int4", "shard_nbytes": 200_000}
    convert_checkpoint(middle, output, **options)
    before = models.contents(output)
    said = json.loads(before["ktk_conversion.json"])
    assert (said["to"], said["source_name"]) == ("int4", "middle")
    min(output.glob("*.safetensors")).unlink()
    convert_checkpoint(middle, output, resume=True, **options)
    assert models.contents(output) == before


def test_what_conversions_say_of_their_folders_is_not_copied(tmp_path: Path) -> None:
    source = models.write(tmp_path / "source")
    for name in ("ktk_conversion.json", "ktk_packed.json"):
        (source / name).write_text("{}")
    assert {str(path) for path in other_files(source, tmp_path / "to")} == set(models.OTHERS)


def test_an_unfinished_folder_is_no_model(tmp_path: Path) -> None:
    source, output = models.write(tmp_path / "source"), tmp_path / "to"
    with CheckpointConversion(source, output, to="fp8", shard_nbytes=200_000) as conversion:
        for shard, _ in conversion.run():
            if shard.path.name.startswith("model-00003"):
                break
    assert len(list(output.glob("*.safetensors"))) == 2
    assert not (output / "config.json").exists()
    convert_checkpoint(source, output, to="fp8", shard_nbytes=200_000, resume=True)
    convert_checkpoint(source, tmp_path / "whole", to="fp8", shard_nbytes=200_000)
    assert models.contents(output) == models.contents(tmp_path / "whole")


def test_a_source_that_has_changed_is_converted_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, output = models.write(tmp_path / "source"), tmp_path / "to"
    options: dict[str, Any] = {"to": "int4", "shard_nbytes": 200_000}
    convert_checkpoint(source, output, **options)
    # In the middle, which names, sizes and ends of files do not show.
    data = bytearray((source / "two.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (source / "two.safetensors").write_bytes(data)
    with CheckpointConversion(source, output, resume=True, **options) as conversion:
        assert len(conversion.todo) == len(conversion.files)
        assert not list(output.glob("*.safetensors"))
        assert not (output / "config.json").exists()
        for _ in conversion.run():
            pass
    assert "two.safetensors changed since" in caplog.text
    convert_checkpoint(source, tmp_path / "whole", **options)
    stamped = "ktk_conversion.json"
    found, wanted = models.contents(output), models.contents(tmp_path / "whole")
    assert {**found, stamped: b""} == {**wanted, stamped: b""}


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    source, output = models.write(tmp_path / "source"), tmp_path / "to"
    with CheckpointConversion(source, output, to="fp8") as conversion:
        steps = conversion.run()
        next(steps)
        (source / "two.safetensors").write_bytes((source / "two.safetensors").read_bytes())
        with pytest.raises(CheckpointError, match=r"two\.safetensors changed while"):
            list(steps)
    assert not list(output.glob("*.safetensors*"))


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_any_write_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """As a full disk, or a quota, lets it fail."""
    source, output = models.write(tmp_path / "source"), tmp_path / "to"
    before = models.contents(source)
    real = getattr(os, call)

    def fail(fd: int, *arguments: Any) -> Any:
        if "model-00002" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(
            CheckpointError, match=r"to is full: model-00002-of-\d+.safetensors needs"
        ):
            convert_checkpoint(source, output, to="mxfp4", shard_nbytes=200_000)
    assert [path.name[:11] for path in output.glob("*.safetensors*")] == ["model-00001"]
    convert_checkpoint(source, output, to="mxfp4", shard_nbytes=200_000, resume=True)
    convert_checkpoint(source, tmp_path / "whole", to="mxfp4", shard_nbytes=200_000)
    assert models.contents(output) == models.contents(tmp_path / "whole")
    assert models.contents(source) == before


def test_a_disk_that_is_too_small_is_found_before_the_first_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models.write(tmp_path / "source")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(CheckpointError, match=r"to has 0\.0 MB free, and the conversion needs"):
        convert_checkpoint(source, tmp_path / "to", to="fp8")
    assert not models.contents(tmp_path / "to")


# --- what is refused ----------------------------------------------------------------------------


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    source, packed = models.write(tmp_path / "source"), tmp_path / "packed"
    convert(source, packed, backend="FP8")
    for folder in (source, packed):
        before = models.contents(folder)
        for resume in (False, True):
            with pytest.raises(CheckpointError, match="is not empty, it holds"):
                convert_checkpoint(source, folder, to="int4", resume=resume)
        assert models.contents(folder) == before


def test_a_conversion_is_gone_on_with_on_demand_and_by_its_own_arguments(tmp_path: Path) -> None:
    source, output = models.write(tmp_path / "source"), tmp_path / "to"
    other = models.write(tmp_path / "other", vocab_size=5)
    convert_checkpoint(source, output, to="int4")
    before = models.contents(output)
    with pytest.raises(CheckpointError, match="holds a conversion already: go on with it by --res"):
        convert_checkpoint(source, output, to="int4")
    for options, message in (
        ({"to": "fp8"}, "was begun with the to int4, not fp8"),
        ({"to": "int4", "group_size": 64}, "was begun with the group_size 128, not 64"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert_checkpoint(source, output, resume=True, **options)
    with pytest.raises(CheckpointError, match=r"begun from source, whose files were not those of"):
        convert_checkpoint(other, output, to="int4", resume=True)
    assert models.contents(output) == before


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    source, output = models.write(tmp_path / "source"), tmp_path / "to"
    convert_checkpoint(source, output, to="int4")
    path = output / "ktk_conversion.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "to": 4}))
    with pytest.raises(CheckpointError, match=r"ktk_conversion.json is damaged: to is 4"):
        convert_checkpoint(source, output, to="int4", resume=True)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    source, output = models.write(tmp_path / "source"), tmp_path / "to"
    output.mkdir()
    with (
        locked(output),
        pytest.raises(CheckpointError, match="is being written by another process"),
    ):
        convert_checkpoint(source, output, to="int4")


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({"to": "int4"}, (2, 48, 96), "no groups of 128, 64 or 32 that divide hidden size 48 and"),
        ({"to": "int4", "group_size": 48}, (2, 64, 96), "a multiple of 8 columns that divides"),
        ({"to": "int4", "group_size": 4}, (2, 64, 96), "a multiple of 8 columns that divides"),
        ({"to": "fp8", "group_size": 128}, (2, 64, 96), "fp8 has groups of its own, not of 128"),
        ({"to": "mxfp4"}, (2, 64, 48), "multiples of 32, and the intermediate size of the experts"),
        ({"to": "nvfp4"}, (2, 8, 48), "multiples of 16, and the hidden size of the experts is 8"),
        ({"to": "int3"}, (2, 64, 96), "no format 'int3': expected one of int4, fp8, nvfp4, mxfp4"),
    ],
)
def test_sizes_that_do_not_fit(
    options: dict[str, Any], sizes: made.Sizes, message: str, tmp_path: Path
) -> None:
    source = made.write(tmp_path / "source", sizes=sizes)
    with pytest.raises(CheckpointError, match=f"source: .*{message}"):
        convert_checkpoint(source, tmp_path / "to", **options)
    assert not (tmp_path / "to").exists()


def _not_finite(source: Path) -> None:
    tensors = load_file(source / "two.safetensors")
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][3, 5] = torch.inf
    save_file(tensors, source / "two.safetensors")


def _in_codes(source: Path) -> None:
    tensors = load_file(source / "one.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, source / "one.safetensors")


def _missing(source: Path) -> None:
    (source / "two.safetensors").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            _not_finite,
            r"tensor model.layers.1.mlp.experts.2.up_proj.weight in .*two.safetensors "
            "holds values that are not finite",
        ),
        (
            _in_codes,
            r"tensor model.layers.0.self_attn.q_proj.weight in .*one.safetensors is of "
            "type F8_E4M3, and ktk knows no scheme",
        ),
        (_missing, r"two.safetensors is missing"),
    ],
)
def test_bad_sources_are_named(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    source = models.write(tmp_path / "source")
    spoil(source)
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(source, tmp_path / "to", to="int4")
    assert not list((tmp_path / "to").glob("*.safetensors*"))


def test_packed_folders_lack_what_a_model_needs(tmp_path: Path) -> None:
    source = models.write(tmp_path / "source")
    convert(source, tmp_path / "packed", backend="BF16")
    with pytest.raises(CheckpointError, match="packed is no folder of safetensors files as hubs"):
        convert_checkpoint(tmp_path / "packed", tmp_path / "to", to="int4")


def test_experts_with_biases_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    config = {**made.config(), "model_type": "gpt_oss"}
    (source / "config.json").write_text(json.dumps(config))
    stem = "model.layers.0.mlp.experts."
    both, one = 2 * made.I, made.H
    save_file(
        {
            f"{stem}gate_up_proj": torch.zeros(made.E, one, both, dtype=torch.bfloat16),
            f"{stem}gate_up_proj_bias": torch.zeros(made.E, both, dtype=torch.bfloat16),
            f"{stem}down_proj": torch.zeros(made.E, made.I, one, dtype=torch.bfloat16),
            f"{stem}down_proj_bias": torch.zeros(made.E, one, dtype=torch.bfloat16),
        },
        source / "model.safetensors",
    )
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj in .*stored so \(gpt-oss\) have no na"
    ):
        convert_checkpoint(source, tmp_path / "to", to="mxfp4")


_GROWTH = """
import re, sys
from ktk.conversion.compressed import CheckpointConversion

def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

with CheckpointConversion(sys.argv[1], sys.argv[2], to="nvfp4", threads=1) as conversion:
    found = [resident() for _ in conversion.run()]
# The first experts bring in what torch needs.
print(max(found[4:]) - max(found[:4]))
"""


@pytest.mark.slow
def test_memory_holds_a_few_experts(tmp_path: Path) -> None:
    """Each has 5 MiB here; 20 experts that are kept in memory would be 100."""
    source = made.write(tmp_path / "source", sizes=(24, 1024, 896))
    done = subprocess.run(
        [sys.executable, "-c", _GROWTH, source, tmp_path / "to"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 50
