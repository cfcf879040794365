"""`ktk serve` with vLLM: clients of OpenAI's interface, eight of them at once, and streaming."""

from __future__ import annotations

import socket
import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import vllm_models as models
from vllm_environment import Vllm

TOKENS = 8
PROMPTS = [
    "The quick brown fox",
    "Memory is read",
    "What is the capital of France?",
    "It is Paris",
    "nothing is computed twice",
    "a router picks two experts",
    "Rome",
    "The lazy dog",
]


@dataclass
class Served:
    """A running server: how clients reach it, the model in float32, and what it printed."""

    client: Any
    model: str
    exact: Any
    log: Path


@pytest.fixture(scope="module")
def served(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    openai = pytest.importorskip("openai")
    folder = tmp_path_factory.mktemp("served")
    exact = models.stored("fp8 by blocks", "self_attn")(folder)
    log = folder / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = ["--enforce-eager", "--max-model-len", "192", "--max-num-seqs", "8"]
    command = [
        str(vllm.python),
        "-m",
        "ktk",
        "serve",
        str(folder),
        "--port",
        str(port),
        "--engine",
        "vllm",
    ]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--", *more],
            env=vllm.environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600)
        end = time.monotonic() + 900
        while True:
            assert process.poll() is None, log.read_text()[-5000:]
            assert time.monotonic() < end, log.read_text()[-5000:]
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.5)
        yield Served(client, str(folder), exact, log)
    finally:
        process.terminate()
        process.wait(60)


def ask(served: Served, prompt: str, **more: Any) -> Any:
    return served.client.completions.create(
        model=served.model,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
        **more,
    )


def test_ktk_serves_what_vllm_could_not(served: Served) -> None:
    first, *rest = served.log.read_text().splitlines()
    assert first.startswith("KTK_VLLM=1 python -m vllm.entrypoints.openai.api_server --model ")
    assert any("ktk computes experts with FP8/" in line for line in rest)
    made = ask(served, PROMPTS[0], logprobs=5)
    assert made.usage.completion_tokens == TOKENS


def test_eight_clients_get_what_each_gets_alone(served: Served) -> None:
    """The same bits come out for a row whatever rows stand beside it, in all that ktk computes."""
    alone = [ask(served, prompt, logprobs=1).choices[0] for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        together = list(clients.map(lambda one: ask(served, one, logprobs=1).choices[0], PROMPTS))
    differences = []
    for one, other in zip(alone, together, strict=True):
        its = other.logprobs
        values = zip(one.logprobs.token_logprobs, its.token_logprobs, strict=True)
        for token, again, (first, second) in zip(
            one.logprobs.tokens, its.tokens, values, strict=True
        ):
            if token != again:  # two that are as good as each other, to vLLM's own attention
                break
            differences.append(abs(first - second))
    prompts = models.prompts(Path(served.model))
    assert statistics.median(differences) <= models.rounding(served.exact, prompts)
    same = sum(one.text == other.text for one, other in zip(alone, together, strict=True))
    assert same >= len(PROMPTS) // 2


def test_text_comes_as_it_is_made(served: Served) -> None:
    whole = ask(served, PROMPTS[1]).choices[0].text
    parts = [part.choices[0].text for part in ask(served, PROMPTS[1], stream=True)]
    assert "".join(parts) == whole
    assert len([part for part in parts if part]) > 1
