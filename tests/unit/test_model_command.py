"""`ktk model`, and models by name: in a cache as the hub's library writes it, and in folders."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from ktk.cli import app
from ktk.errors import CheckpointError
from ktk.hub import cache_folder, cached_models, find_model, models_in

runner = CliRunner()
E, H, I = 2, 64, 32  # noqa: E741 - the names of the table of families
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"
CONFIG = {
    "model_type": "qwen3_moe",
    "num_experts": E,
    "num_experts_per_tok": 1,
    "hidden_size": H,
    "moe_intermediate_size": I,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache and a configuration of its own."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "KTK_BACKEND", "KTK_MODELS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "hf" / "hub"


def write(folder: Path, dense: int = 100) -> Path:
    """Write a model of one layer, and a tensor that is no expert's."""
    folder.mkdir(parents=True)
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    tensors = {
        f"model.layers.0.mlp.experts.{e}.{part}_proj.weight": torch.ones(shape).bfloat16()
        for e in range(E)
        for part, shape in shapes.items()
    }
    save_file(tensors | {"model.norm.weight": torch.ones(dense)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def store(cache: Path, name: str, source: Path, commit: str = COMMIT, *, main: bool = True) -> Path:
    """Store a folder's files as the hub's library does: content by checksum, links by name."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for made in (snapshot, folder / "blobs", folder / "refs"):
        made.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        data = file.read_bytes()
        git = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        large = file.suffix in (".safetensors", ".gguf")
        blob = folder / "blobs" / (hashlib.sha256(data).hexdigest() if large else git)
        blob.write_bytes(data)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    if main:
        (folder / "refs" / "main").write_text(commit)
    return snapshot


def run(*arguments: str, status: int = 0) -> str:
    result = runner.invoke(app, ["model", *arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout


def test_the_cache_is_found_where_the_library_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("huggingface_hub")
    # The library reads variables when it is imported, and knows no others.
    constants = Path(library.__file__).with_name("constants.py").read_text()
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        assert f'"{variable}"' in constants
    assert cache_folder() == Path(os.environ["HF_HOME"]) / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", "/elsewhere")
    assert cache_folder() == Path("/elsewhere")
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert cache_folder() == Path("/c/huggingface/hub")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/huggingface/hub"


def test_what_is_listed_is_what_the_library_sees(cache: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("huggingface_hub")
    source = write(tmp_path / "source")
    snapshot = store(cache, "acme/small-moe", source)
    older = store(cache, "acme/small-moe", source, OLDER, main=False)
    seen = library.scan_cache_dir(cache)
    assert not seen.warnings
    [repository] = seen.repos
    assert {revision.snapshot_path for revision in repository.revisions} == {snapshot, older}
    found = {one.name: one.path for one in cached_models()}
    assert found == {repository.repo_id: snapshot, f"{repository.repo_id}@{OLDER}": older}
    for name, path in found.items():
        assert find_model(name) == path
    assert find_model(f"acme/small-moe@{OLDER[:7]}") == older


def test_a_model_is_listed_with_what_it_takes(cache: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "own" / "mine")
    store(cache, "acme/small-moe", source)
    document = json.loads(run("list", "--json"))
    [entry] = document["models"]
    experts = E * 3 * H * I * 2
    size = (source / "model.safetensors").stat().st_size
    assert (entry["name"], entry["backend"], entry["stored"]) == ("acme/small-moe", "BF16", "BF16")
    assert (entry["nbytes"], entry["fault"]) == (size, "")
    # bf16 is packed without a byte more, and all else stays.
    assert entry["memory"] == size
    assert size - experts >= 400
    runner.invoke(app, ["config", "models", str(tmp_path / "own")])
    runner.invoke(app, ["config", "backend", "AMXINT8"])
    entries = json.loads(run("list", "--json"))["models"]
    assert [entry["name"] for entry in entries] == ["acme/small-moe", "mine"]
    assert {entry["backend"] for entry in entries} == {"AMXINT8"}
    assert all(entry["memory"] < size for entry in entries)
    text = run("list")
    assert "acme/small-moe" in text
    assert "AMXINT8" in text
    # Every command takes the names that are listed.
    for name in ("acme/small-moe", "mine"):
        assert runner.invoke(app, ["inspect", name]).exit_code == 0
        assert "BF16" in run("info", name)


def test_an_empty_machine_is_told_how_to_get_a_model() -> None:
    assert "hf download" in run("list")
    assert json.loads(run("list", "--json"))["models"] == []


def test_a_file_that_is_cut_off_is_named(cache: Path, tmp_path: Path) -> None:
    snapshot = store(cache, "acme/small-moe", write(tmp_path / "source"))
    blob = (snapshot / "model.safetensors").resolve()
    os.truncate(blob, blob.stat().st_size - 8)
    assert "not usable: acme/small-moe: " in run("list")
    assert "truncated" in run("list")
    [entry] = json.loads(run("list", "--json"))["models"]
    assert entry["memory"] is None
    assert "model.safetensors" in entry["fault"]
    assert run("verify", "acme/small-moe", status=1).count("model.safetensors") >= 2


def test_a_file_that_is_gone_is_named(cache: Path, tmp_path: Path) -> None:
    snapshot = store(cache, "acme/small-moe", write(tmp_path / "source"))
    (snapshot / "model.safetensors").resolve().unlink()
    assert "model.safetensors" in run("verify", "acme/small-moe", status=1)


def test_a_link_to_a_file_that_is_gone_hides_no_other_model(cache: Path, tmp_path: Path) -> None:
    store(cache, "some/whole", write(tmp_path / "source"))
    snapshot = cache / "models--some--gone" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    (snapshot / "model.gguf").symlink_to(tmp_path / "nowhere")
    result = runner.invoke(app, ["model", "list"])
    assert result.exit_code == 0
    assert "some/whole" in result.output
    assert "some/gone" in result.output


def test_a_model_that_may_not_be_read_hides_no_other_one(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = store(cache, "acme/closed", write(tmp_path / "source"))
    unlisted = store(cache, "acme/unlisted", tmp_path / "source").parent
    store(cache, "acme/open", tmp_path / "source")
    real = os.stat

    # A folder without the right to search it; root has that right anywhere.
    def stat(path: Any, *args: Any, **named: Any) -> os.stat_result:
        if isinstance(path, (str, Path)) and {closed, unlisted} & set(Path(path).parents):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *args, **named)

    monkeypatch.setattr(os, "stat", stat)
    entries = {entry["name"]: entry for entry in json.loads(run("list", "--json"))["models"]}
    assert not entries["acme/open"]["fault"]
    fault = entries["acme/closed"]["fault"]
    assert fault == f"{closed / 'config.json'} cannot be read: Permission denied"
    text = run("list")
    assert "not usable: acme/closed: " in text
    assert "acme/open" in text


def test_a_file_of_the_hub_that_cannot_be_read_is_named(cache: Path, tmp_path: Path) -> None:
    snapshot = store(cache, "acme/small-moe", write(tmp_path / "source"))
    config, weights = (snapshot / name for name in ("config.json", "model.safetensors"))
    blob = snapshot / config.readlink()
    blob.unlink()
    blob.symlink_to("/proc/self/mem")  # reading its first bytes is an input/output error
    resolved = weights.resolve()
    resolved.unlink()
    resolved.mkdir()
    text = run("verify", "acme/small-moe", status=1)
    assert f"{config}: {blob} cannot be read: Input/output error" in text
    assert f"{weights}: {snapshot / weights.readlink()} is a folder, expected a file" in text
    assert f"{snapshot}: 2 of 2 files of the hub are not whole" in text
    document = json.loads(run("verify", "acme/small-moe", "--json", status=1))
    assert len(document["files"]) == 2


def test_what_is_known_is_shown_beside_a_tokenizer_that_cannot_be_read(tmp_path: Path) -> None:
    model = write(tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").mkdir()
    text = run("info", str(model))
    said = f"{model / 'tokenizer_config.json'} cannot be read: Is a directory"
    assert f"tokenizer: tokenizer.json; {said}" in text
    assert "Headers only" in text


def test_everything_is_read_and_compared_with_its_checksum(cache: Path, tmp_path: Path) -> None:
    snapshot = store(cache, "acme/small-moe", write(tmp_path / "source"))
    text = run("verify", "acme/small-moe")
    assert "2 files of the hub were read; all have their checksums" in text
    assert "nothing is wrong; 2 experts" in text
    document = json.loads(run("verify", "acme/small-moe", "--json"))
    assert (document["sound"], document["checksums"], document["experts"]) == (True, 2, E)
    # One bit of the tensor that no backend reads.
    blob = (snapshot / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    text = run("verify", "acme/small-moe", status=1)
    assert f"{snapshot / 'model.safetensors'} is damaged: its checksum is " in text
    assert not json.loads(run("verify", "acme/small-moe", "--json", status=1))["sound"]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("acme/other", "download it: hf download acme/other"),
        ("acme/small-moe@v2", "hf download acme/small-moe --revision v2"),
        ("small-mo", "Did you mean small-moe"),
        ("acme/small-moe:Q4_K_M", "no GGUF files of acme/small-moe are called 'Q4_K_M': none"),
    ],
)
def test_what_is_not_here_is_told_how_to_get(
    name: str, what: str, cache: Path, tmp_path: Path
) -> None:
    source = write(tmp_path / "own" / "small-moe")
    store(cache, "acme/small-moe", source)
    with pytest.raises(CheckpointError) as caught:
        find_model(name, [str(source.parent)])
    assert what in str(caught.value)
    assert find_model("small-moe", [str(source.parent)]) == source


def test_a_download_of_the_tokenizer_alone_is_no_model(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    store(cache, "acme/small-moe", source)
    with pytest.raises(CheckpointError, match="in part only"):
        find_model("acme/small-moe")


def test_one_of_several_gguf_files_is_chosen(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    names = ("m-Q4_K_M.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf")
    for name in names:
        (source / name).write_bytes(name.encode())
    snapshot = store(cache, "acme/moe-GGUF", source)
    assert find_model("acme/moe-GGUF:q4_k_m") == snapshot / names[0]
    assert find_model("acme/moe-GGUF:Q8_0") == snapshot / names[1]
    assert find_model(f"acme/moe-GGUF:{names[0]}") == snapshot / names[0]
    with pytest.raises(CheckpointError, match="several GGUF files of acme/moe-GGUF are called 'm'"):
        find_model("acme/moe-GGUF:m")
    assert [one.name for one in cached_models()] == [f"acme/moe-GGUF:{name}" for name in names[:2]]


def test_gguf_models_in_folders_of_a_repository(cache: Path) -> None:
    snapshot = cache / "models--big--GGUF" / "snapshots" / COMMIT
    shards = [f"Big-{kind}-0000{i}-of-00002.gguf" for kind in ("Q8_0", "UD-Q8_0") for i in (1, 2)]
    for shard in shards:
        folder = snapshot / shard.removeprefix("Big-").partition("-0000")[0]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / shard).write_bytes(b"GGUF" + bytes(60))
    first, other = snapshot / "Q8_0" / shards[0], snapshot / "UD-Q8_0" / shards[2]
    assert find_model("big/GGUF:Q8_0") == first
    assert find_model("big/GGUF:UD-Q8_0") == other
    assert find_model("big/GGUF:q8_0") == first
    listed = [f"big/GGUF:Q8_0/{shards[0]}", f"big/GGUF:UD-Q8_0/{shards[2]}"]
    assert [one.name for one in cached_models()] == listed
    assert [find_model(name) for name in listed] == [first, other]
    assert find_model(f"big/GGUF:{shards[0]}") == first
    with pytest.raises(CheckpointError, match=f"give big/GGUF:FILE, of Q8_0/{shards[0]}, UD-Q8_0"):
        find_model("big/GGUF")
    small = snapshot / "Big-Q2_K.gguf"  # small types are often beside the folders
    small.write_bytes(b"GGUF" + bytes(60))
    assert find_model("big/GGUF:Q2_K") == small
    assert find_model("big/GGUF:Q8_0") == first
    with pytest.raises(CheckpointError, match=r"has several models: .* Big-Q2_K\.gguf, Q8_0/"):
        find_model("big/GGUF")
    names = [one.name for one in models_in([str(snapshot)])]
    assert len(names) == len(set(names)) == 3
    like = snapshot / "UD-Q8_0" / small.name
    like.write_bytes(b"GGUF" + bytes(60))
    assert all(find_model(one.name) == one.path for one in cached_models())
    like.unlink()
    small.unlink()
    (snapshot / "config.json").write_text("{}")
    assert find_model("big/GGUF:UD-Q8_0") == other
    for shard in shards[2:]:
        (snapshot / "UD-Q8_0" / shard).unlink()
    assert find_model("big/GGUF") == first


def test_a_damaged_reference_hides_no_other_model(cache: Path, tmp_path: Path) -> None:
    store(cache, "some/model", write(tmp_path / "made"))
    damaged = cache / "models--a--b" / "refs"
    damaged.mkdir(parents=True)
    (damaged / "main").write_bytes(b"\xff\xfe")
    assert [one.name for one in cached_models()] == ["some/model"]
    with pytest.raises(CheckpointError, match="Did you mean some/model"):
        find_model("model")
