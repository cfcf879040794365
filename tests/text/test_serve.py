"""`ktk serve`: transformers' own server, asked by an OpenAI client, and what others need."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from terminal import Command

from ktk.serving import engines
from ktk.serving.engines import Request

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TOKENS = 12


@dataclass
class Served:
    """A running server: how clients reach it, and what it printed."""

    client: Any
    model: str
    log: Path


@contextlib.contextmanager
def started(model: Path, log: Path, *more: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a server of transformers that listens, and its port."""
    for package in engines.ENGINES["transformers"].needs:
        pytest.importorskip(package)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ktk", "serve", str(model), "--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--threads", "1", *more],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + 300
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.2)
        yield process, port
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    openai = pytest.importorskip("openai")
    log = tmp_path_factory.mktemp("served") / "log"
    with started(model, log, "--backend", "AMXINT8") as (_, port):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=300)
        yield Served(client, str(model), log)


@pytest.mark.slow
def test_the_command_is_printed_and_ktk_computes(served: Served) -> None:
    ask(served)
    first, second, *rest = served.log.read_text().splitlines()
    assert first.startswith("python -m ktk.serving.transformers --backend AMXINT8 --threads 1 -- ")
    assert second.endswith(f"model={served.model}")
    assert "Traceback" not in "\n".join(rest)


def ask(served: Served, **more: Any) -> Any:
    return served.client.chat.completions.create(
        model=served.model, messages=MESSAGES, max_tokens=TOKENS, temperature=0, **more
    )


def complete(text: str) -> str:
    """Return a text without white space around it, and the part of a character at its end."""
    return text.rstrip("\ufffd\n").strip()


@pytest.mark.slow
def test_a_client_gets_what_ktk_run_says(served: Served, command: Command) -> None:
    arguments = ("--backend", "AMXINT8", "--greedy", "-n", str(TOKENS))
    done = command("run", served.model, "-p", MESSAGES[0]["content"], *arguments)
    answer = ask(served).choices[0]
    assert complete(answer.message.content) == complete(done.stdout)
    assert answer.finish_reason == "length"


@pytest.mark.slow
def test_a_client_gets_text_as_it_comes(served: Served) -> None:
    whole = ask(served).choices[0].message.content
    parts = [part.choices[0].delta.content or "" for part in ask(served, stream=True)]
    assert complete("".join(parts)) == complete(whole)
    assert len([part for part in parts if part]) > 1


@pytest.mark.slow
def test_completions_go_on_with_a_prompt(served: Served) -> None:
    made = served.client.completions.create(
        model=served.model, prompt="Memory is read", max_tokens=TOKENS, temperature=0
    )
    assert made.choices[0].text
    assert made.usage.completion_tokens == TOKENS


@pytest.mark.slow
def test_two_clients_at_once_get_their_own_answers(served: Served) -> None:
    def one(question: str) -> str:
        made = served.client.chat.completions.create(
            model=served.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=TOKENS,
            temperature=0,
        )
        text: str = made.choices[0].message.content
        return text

    questions = ["What is the capital of France?", "And of Italy?"] * 2
    alone = [one(question) for question in questions[:2]]
    assert alone[0] != alone[1]
    with ThreadPoolExecutor(2) as two:
        assert list(two.map(one, questions)) == alone * 2


def test_a_dry_run_prints_the_command_only(model: Path, command: Command) -> None:
    for package in engines.ENGINES["transformers"].needs:
        pytest.importorskip(package)
    done = command("serve", str(model), "--dry-run", "--port", "9", "--", "--reasoning", "off")
    assert (done.returncode, done.stdout) == (0, "")
    expected = f"-- serve {model} --host 127.0.0.1 --port 9 --reasoning off\n"
    assert expected in done.stderr


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["{model}", "-b", "AMXINT9"], "no backend 'AMXINT9'"),
        (["{model}", "--head", "AMXINT9"], "no backend 'AMXINT9'"),
        (["{model}", "--threads", "100000"], "100000 threads are more than a machine"),
        (["{bare}"], "config.json is missing"),
        (["{untold}"], "has no tokenizer"),
    ],
)
def test_what_cannot_be_served_is_one_line_before_a_start(
    model: Path, tmp_path: Path, arguments: list[str], what: str, command: Command
) -> None:
    for package in engines.ENGINES["transformers"].needs:
        pytest.importorskip(package)
    for name, left_out in (("bare", "config.json"), ("untold", "token")):
        (tmp_path / name).mkdir()
        for path in model.iterdir():
            if left_out not in path.name:
                (tmp_path / name / path.name).symlink_to(path)
    places = {"model": model, "bare": tmp_path / "bare", "untold": tmp_path / "untold"}
    given = [text.format(**places) for text in arguments]
    done = command("serve", *given, "--engine", "transformers", "--dry-run")
    assert (done.returncode, done.stdout) == (1, "")
    assert what in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_interrupted_server_ends_as_commands_do(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(model, log, "--engine", "transformers") as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_gguf_file_is_named_as_transformers_does() -> None:
    assert engines.served_as(Request(Path("/m/x-Q4_K_M.gguf"))) == "/m:x-Q4_K_M.gguf"


@pytest.mark.parametrize("name", ["one.gguf", "one-00001-of-00002.gguf"])
def test_a_folder_with_a_gguf_file_is_that_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).touch()
    monkeypatch.setattr(engines, "open_checkpoint", _Opened)
    assert engines.served_as(Request(tmp_path)) == f"{tmp_path}:{name}"
    for engine in ("vllm", "sglang"):
        assert "GGUF files" in engines.ENGINES[engine].refusal(Request(tmp_path))


class _Opened:
    """A checkpoint of the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def files(self) -> list[Path]:
        return sorted(self._folder.iterdir())


def test_without_a_server_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(ImportError) as caught:
        engines.choose()
    text = str(caught.value)
    for name in ("transformers: ", "vllm: ", "sglang: ", "pip install 'ktk[serve]'"):
        assert name in text
    with pytest.raises(ValueError, match="no engine 'tgi'; there are vllm, sglang, transformers"):
        engines.choose("tgi")


def test_others_serve_where_ktk_is_plugged_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: name == "vllm" or None)
    monkeypatch.setattr(engines, "entry_points", lambda group: [])
    with pytest.raises(ImportError, match=r"no plug-in for it \(no entry point ktk in vllm"):
        engines.choose("vllm")
    plugged = EntryPoint("ktk", "ktk.vllm:register", "vllm.general_plugins")
    monkeypatch.setattr(engines, "entry_points", lambda group: [plugged])
    engine = engines.choose()
    assert engine.name == "vllm"
    command = engine.command(Request(Path("/m"), port=7))
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert command[3:] == ["--model", "/m", "--host", "127.0.0.1", "--port", "7"]
    assert engine.environment(Request(Path("/m"))) == {"KTK_VLLM": "1"}
    asked = engine.environment(Request(Path("/m"), backend="AMXINT8"))
    assert asked == {"KTK_VLLM": "1", "KTK_BACKEND": "AMXINT8"}


def test_a_torchvision_of_another_torch_is_said_before_a_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}

    def fails(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    plugged = EntryPoint("ktk", "ktk.vllm:register", "vllm.general_plugins")
    monkeypatch.setattr(engines, "find_spec", lambda name: name == "vllm" or None)
    monkeypatch.setattr(engines, "entry_points", lambda group: [plugged])
    monkeypatch.setattr(engines, "version", versions.__getitem__)
    monkeypatch.setattr(engines, "import_module", fails)
    with pytest.raises(ImportError) as caught:
        engines.choose()
    assert str(caught.value) == (
        "vllm cannot start: torchvision 0.28.0 does not go with torch 2.13.0+cpu "
        "(operator torchvision::nms does not exist). "
        "Without it, vLLM serves text: pip uninstall torchvision torchaudio torchcodec"
    )
    versions["torchvision"] = "0.28.0+cpu"
    assert engines.choose().name == "vllm"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request(Path("/m/x.gguf")), "it reads no GGUF files"),
        (Request(Path("/m"), experts=Path("/e")), "it reads no packed experts"),
        (Request(Path("/m"), head="BF16", threads=2), "it has no --head and no --threads"),
    ],
)
def test_what_vllm_does_not_serve_goes_to_the_next(
    monkeypatch: pytest.MonkeyPatch, request_: Request, reason: str
) -> None:
    plugged = EntryPoint("ktk", "ktk.vllm:register", "vllm.general_plugins")
    monkeypatch.setattr(engines, "entry_points", lambda group: [plugged])
    monkeypatch.setattr(engines, "find_spec", lambda name: name)
    assert engines.choose(None, Request(Path("/m"))).name == "vllm"
    assert engines.choose(None, request_).name == "transformers"
    with pytest.raises(ImportError, match=f"vllm: {reason}"):
        engines.choose("vllm", request_)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """SGLang and transformers are installed, and ktk is plugged in."""
    plugged = EntryPoint("ktk", "ktk.sglang:register", "sglang.srt.plugins")
    monkeypatch.setattr(engines, "entry_points", lambda group: [plugged])
    monkeypatch.setattr(engines, "find_spec", lambda name: None if name == "vllm" else name)
    return monkeypatch


@pytest.mark.parametrize("flags", [{"avx2"}, {"avx2", "amx_tile"}])
def test_sglang_serves_on_a_cpu(sglang: pytest.MonkeyPatch, flags: set[str]) -> None:
    sglang.setattr(engines, "_has_gpu", lambda: False)
    sglang.setattr(engines, "cpu_flags", lambda: flags)
    engine = engines.choose(None, Request(Path("/m")))
    assert engine.name == "sglang"
    command = engine.command(Request(Path("/m"), port=7))
    start = [sys.executable, "-m", "sglang.launch_server", "--model-path", "/m", "--device", "cpu"]
    torch = [] if "amx_tile" in flags else ["--attention-backend", "torch_native"]
    assert command == [*start, *torch, "--host", "127.0.0.1", "--port", "7"]
    assert engine.environment(Request(Path("/m"), backend="AMXINT8")) == {
        "SGLANG_USE_CPU_ENGINE": "1",
        "KTK_SGLANG": "1",
        "KTK_BACKEND": "AMXINT8",
    }
    for request in (
        Request(Path("/m.gguf")),
        Request(Path("/m"), experts=Path("/e")),
        Request(Path("/m"), threads=2),
        Request(Path("/m"), linears="BF16"),
    ):
        assert engines.choose(None, request).name == "transformers"


@pytest.mark.slow
def test_sglang_has_ktk_beside_a_gpu(sglang: pytest.MonkeyPatch, model: Path) -> None:
    sglang.setattr(engines, "_has_gpu", lambda: True)
    engine = engines.choose(None, Request(model, threads=4))
    assert engine.name == "sglang"
    assert engine.environment(Request(model)) == {}
    command = engine.command(Request(model, threads=4))
    at = command.index("--kt-weight-path")
    own = ["--kt-weight-path", str(model), "--kt-method", "BF16", "--kt-cpuinfer", "4"]
    assert command[at : at + 8] == [*own, "--kt-num-gpu-experts", "0"]
    packed = Request(Path("/m"), experts=Path("/e"), backend="AMXINT4")
    assert engines.choose(None, packed).name == "sglang"
    command = engine.command(packed)
    assert command[command.index("--kt-weight-path") + 1] == "/e"
    assert command[command.index("--kt-method") + 1] == "AMXINT4"
    assert engines.choose(None, Request(model, head="BF16")).name == "transformers"
