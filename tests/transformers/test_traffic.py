"""What headers say a token reads is what transformers' model in memory would read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from typer.testing import CliRunner

from ktk.cli import app
from ktk.transformers import bytes_per_token


@pytest.mark.parametrize("tied", [False, True])
def test_headers_tell_what_a_token_reads(tmp_path: Path, tied: bool) -> None:
    family = tiny.Family("Qwen3MoeForCausalLM", {"tie_word_embeddings": tied})
    model = family.make().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    read = bytes_per_token(model)
    done = CliRunner().invoke(app, ["inspect", str(tmp_path), "--json"])
    told = json.loads(done.stdout)["bytes_per_token"]
    assert (told["experts"], told["head"]) == (read["experts"], read["head"])
    row = model.get_input_embeddings().weight[0].nbytes  # of an embedding: no part of `rest`
    assert told["rest"] + row == read["linears"] + read["other"]
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert "A token reads, as stored: experts " in shown.stdout
