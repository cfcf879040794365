"""Loading takes the memory of what is loaded, though the files hold more than two gigabytes."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ktk.system import available_memory

LAYERS, EXPERTS, H, INTER = 4, 57, 2048, 768
HERE = Path(__file__).parent


def config(layers: int, experts: int) -> Any:
    return transformers.Qwen3MoeConfig(  # type: ignore[call-arg] # head_dim is one of its keywords
        vocab_size=2048,
        hidden_size=H,
        moe_intermediate_size=INTER,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        num_experts=experts,
        num_experts_per_tok=2,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )


def write(folder: Path, made: Any) -> Path:
    """Write a model's files without ever having it in memory."""
    folder.mkdir()
    made.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(made)
    shapes = {k: v.shape for k, v in model.state_dict().items() if ".experts." not in k}
    for layer in range(made.num_hidden_layers):
        for expert in range(made.num_experts):
            stem = f"model.layers.{layer}.mlp.experts.{expert}"
            for part, shape in (("gate", (INTER, H)), ("up", (INTER, H)), ("down", (H, INTER))):
                shapes[f"{stem}.{part}_proj.weight"] = torch.Size(shape)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    some = (torch.randn(H * INTER, generator=torch.Generator().manual_seed(0)) / 40).bfloat16()
    block = some.view(torch.uint8).numpy().tobytes()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            left = 2 * math.prod(shape)
            while left:
                left -= file.write(block[: min(left, len(block))])
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two gigabytes")
    needed = 3 * 2**30
    if (free := shutil.disk_usage(folder).free) < needed:
        pytest.skip(f"needs 3 GiB of disk, and {folder} has {free / 2**30:.1f}")
    if (free := available_memory()) < 2 * needed:
        pytest.skip(f"needs 6 GiB of memory, and there are {free / 2**30:.1f}")
    write(folder / "model-warm", config(1, 2))
    return write(folder / "model", config(LAYERS, EXPERTS))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["BF16", "AMXINT8"])
def test_peak_of_anonymous_memory(model: Path, backend: str) -> None:
    assert (model / "model.safetensors").stat().st_size > 2 * 2**30
    command = [sys.executable, str(HERE / "load_and_tell.py"), str(model), backend]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE
    )
    assert child.stdin
    assert child.stdout
    assert child.stdout.readline() == "ready\n"
    child.stdin.write("go\n")
    child.stdin.flush()
    peak, status = 0, Path(f"/proc/{child.pid}/status")
    while child.poll() is None:
        time.sleep(0.002)  # two processors are for loading
        text = status.read_text()
        if "RssAnon:" in text:
            peak = max(peak, 1024 * int(text.split("RssAnon:")[1].split()[0]))
    told = json.loads(child.stdout.read())
    loaded = told["packed"] + told["rest"]
    assert told["packed"] > 2 * 2**30 / (1 if backend == "BF16" else 2.2)
    # The parent looked often enough to see at least what was there in the end.
    assert peak >= told["before"] + told["after"] * 0.99
    print(f"{backend}: peak {(peak - told['before']) / loaded:.3f} of what is loaded")
    assert peak - told["before"] <= 1.05 * loaded
