"""What README's first lines say, of each listed model: files, a tokenizer, and then text."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import published
import pytest
import tiny
import torch
import transformers
from tiny import Reference

import ktk.transformers
from ktk.__main__ import main
from ktk.transformers.linears import pack_bf16
from ktk.transformers.packed import packed_modules
from tests.transformers.test_families import all_packed
from tests.transformers.test_stored import check_layers, check_rest

PROMPT = "What is the capital of France?"
TOKENS = 6


@pytest.fixture
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the user's configuration out, and in what the command sets in its process."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("BACKEND", "DEVICE", "LINEARS", "HEAD", "MODELS", "THREADS"):
        monkeypatch.delenv(f"KTK_{name}", raising=False)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    logging: Any = transformers.utils.logging
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)
    logging.enable_progress_bar()


def from_pretrained(path: Path, **options: Any) -> Any:
    """Load a model by the line at the top of README."""
    if path.is_file():
        path, options["gguf_file"] = path.parent, path.name
    return tiny.load(path, experts_implementation="ktk", **options)


def generated(model: Any, path: Path) -> tuple[str, int]:
    """Return the text that transformers makes, and of how many tokens."""
    tokenizer = ktk.transformers.load_tokenizer(path)
    if tokenizer.chat_template:
        message = [{"role": "user", "content": PROMPT}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        inputs = tokenizer(PROMPT, return_tensors="pt")
    ids = inputs["input_ids"]
    made = model.generate(ids, do_sample=False, max_new_tokens=TOKENS)[0, ids.shape[1] :]
    return tokenizer.decode(made, skip_special_tokens=True), len(made)


@pytest.mark.slow
@pytest.mark.usefixtures("own_settings")
@pytest.mark.parametrize("name", published.MODELS)
def test_two_lines_and_a_command_make_text_of_a_model(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, exact = published.write(name, tmp_path / "model")
    backend = published.MODELS[name][1]

    model = from_pretrained(path)
    assert all_packed(model, backend)
    pack_bf16(model)  # as the command does
    text, tokens = generated(model, path)
    arguments = ["run", str(path), "-p", PROMPT, "--greedy", "-n", str(TOKENS), "--json"]
    monkeypatch.setattr(sys, "argv", ["ktk", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    document = json.loads(said.out)
    assert (document["text"], document["tokens"]) == (text, tokens)
    assert document["backends"] == [backend]

    config = ktk.transformers.KtkConfig("AMXINT4")
    model = from_pretrained(path, quantization_config=config, dtype=torch.float32)
    assert all_packed(model, "AMXINT4")
    check_layers(path, Reference.of(path, exact), list(packed_modules(model).values()))
    check_rest(model, exact)
