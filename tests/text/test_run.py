"""`ktk run`: the text of transformers' own greedy search, in a terminal, a pipe, and as JSON."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf_model
import pytest
import text_models
import torch
import transformers
from terminal import Command, Terminal

from ktk.hub import cache_folder
from ktk.text.run import visible
from tests.unit.test_model_command import store

PROMPT = "What is the capital of France?"
TOKENS = 24


@pytest.fixture
def run(command: Command) -> Command:
    """Return a function that runs `ktk run`."""
    return functools.partial(command, "run")


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    """What transformers answers on its own, from logits of the same packed weights."""
    from ktk.transformers import load
    from ktk.transformers.linears import pack_bf16

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    loaded = load(model)
    pack_bf16(loaded)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    with torch.no_grad():
        made = loaded.generate(ids, do_sample=False, max_new_tokens=TOKENS)
    text: str = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    assert len(text) > TOKENS / 2
    return text


def test_a_pipe_has_the_text_and_nothing_else(model: Path, expected: str, run: Command) -> None:
    arguments = ["run", str(model), "--greedy", "-n", str(TOKENS)]
    done = subprocess.run(
        [sys.executable, "-m", "ktk", *arguments], input=PROMPT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
    assert f"reply {TOKENS} tokens at " in done.stderr
    assert "experts by BF16" in done.stderr
    assert "\x1b" not in done.stderr
    given = run(str(model), "-p", PROMPT, "--greedy", "-n", str(TOKENS))
    assert given.stdout == done.stdout


@pytest.mark.slow
def test_a_terminal_shows_the_text_and_then_the_report(model: Path, expected: str) -> None:
    arguments = ["run", str(model), "-p", PROMPT, "--greedy", "-n", str(TOKENS)]
    with Terminal(arguments) as terminal:
        assert terminal.status() == 0, terminal.seen
        after = terminal.seen.partition(visible(expected) + "\n")[2]
        assert after.startswith("prompt "), terminal.seen
        # Lines break between words.
        assert max(map(len, after.splitlines())) <= 80


def on_screen(text: str) -> list[str]:
    """Return the lines that a terminal of 80 columns shows, and 24 rows."""
    pyte = pytest.importorskip("pyte")
    screen = pyte.Screen(80, 24)
    screen.set_mode(pyte.modes.LNM)  # ends of lines are "\n" here, as programs write them
    pyte.Stream(screen).feed(text)
    return "\n".join(line.rstrip() for line in screen.display).rstrip().split("\n")


@pytest.mark.slow
def test_a_screen_has_a_bar_that_is_full_the_text_and_the_report(
    model: Path, expected: str
) -> None:
    arguments = ["run", str(model), "-p", PROMPT, "--greedy", "-n", str(TOKENS)]
    with Terminal(arguments, kind="xterm-256color") as terminal:
        assert terminal.status() == 0, terminal.seen
    assert "\x1b" in terminal.seen
    bar, *lines = on_screen(terminal.seen)
    size = re.escape("98.3/98.3 kB")
    assert re.fullmatch(rf"layer 1 \(BF16\) ━+ {size} [\d.?]+ [kMG]?B/s 0:00:00", bar), bar
    text = on_screen(visible(expected))
    assert lines[: len(text)] == text
    report = lines[len(text) :]
    number = r"[\d.e+]+"
    wanted = (
        rf"prompt \d+ tokens at {number}/s, reply {TOKENS} tokens at {number}/s; cut off there "
        rf"\(--max-tokens\) loaded in {number} s, experts by BF16, 1 threads, {number} MiB at "
        r"most; a token reads experts 0\.0 MB, linears 0\.1 MB, head 0\.1 MB, other 0\.0 MB"
    )
    assert re.fullmatch(wanted, " ".join(report)), report
    assert len(report) == 4  # broken between words


def test_json_has_what_the_reply_took(model: Path, expected: str, run: Command) -> None:
    done = run(str(model), "-p", PROMPT, "--greedy", "-n", str(TOKENS), "--json")
    document = json.loads(done.stdout)
    assert document["text"] == expected
    assert (document["tokens"], document["finish"]) == (TOKENS, "length")
    assert document["backends"] == ["BF16"]
    for name, count in (("prefill", document["prompt_tokens"]), ("decode", TOKENS - 1)):
        phase = document[name]
        assert phase["tokens"] == count
        assert phase["tokens_per_second"] == pytest.approx(count / phase["seconds"])
    both = document["prefill"]["seconds"] + document["decode"]["seconds"]
    assert document["seconds"] == pytest.approx(both)
    config = text_models.config()
    experts = config.num_hidden_layers * config.num_experts_per_tok
    assert document["bytes_per_token"]["experts"] == experts * 3 * 64 * 32 * 2
    assert document["bytes_per_token"]["head"] == 512 * 64 * 2
    assert document["peak_memory"] > 10**8
    assert document["load_seconds"] > 0


def test_a_full_context_is_not_blamed_on_an_option(
    tmp_path: Path, model: Path, run: Command
) -> None:
    folder = shutil.copytree(model, tmp_path / "short")
    config = json.loads((folder / "config.json").read_text())
    ids = text_models.tokenizer()(PROMPT).input_ids
    config["max_position_embeddings"] = len(ids) + 5
    (folder / "config.json").write_text(json.dumps(config))
    arguments = (str(folder), "-p", PROMPT, "--raw", "--greedy", "-n", "20")
    done = run(*arguments)
    assert "reply 5 tokens" in done.stderr
    assert "the context of this model is full" in done.stderr
    assert "--max-tokens" not in done.stderr
    document = json.loads(run(*arguments, "--json").stdout)
    assert (document["tokens"], document["finish"]) == (5, "context")


def test_a_model_without_a_template_goes_on_with_the_prompt(
    tmp_path: Path, model: Path, run: Command
) -> None:
    plain = text_models.write(tmp_path / "plain", template=None)
    one, other = (
        json.loads(run(str(path), "-p", PROMPT, "--greedy", "-n", "4", "--json", *more).stdout)
        for path, more in ((plain, []), (model, ["--raw"]))
    )
    assert (
        one["prompt_tokens"]
        == other["prompt_tokens"]
        == len(text_models.tokenizer()(PROMPT).input_ids)
    )
    assert one["text"] == other["text"]
    done = run(str(plain), "-p", PROMPT, "--system", "Be brief.")
    assert (done.returncode, done.stdout) == (1, "")
    assert "--system needs a chat template" in done.stderr


def test_sampling_is_the_models_unless_it_is_asked_otherwise(model: Path, run: Command) -> None:
    def text(*more: str) -> str:
        done = run(str(model), "-p", PROMPT, "-n", "16", "--json", *more)
        return str(json.loads(done.stdout)["text"])

    greedy = text("--greedy")
    # This model's generation_config samples nothing.
    assert text() == text("--temperature", "0") == text("--temperature", "1e-300") == greedy
    sampled = text("--temperature", "1.5", "--seed", "3")
    assert sampled == text("--temperature", "1.5", "--seed", "3")
    assert sampled != greedy
    assert text("--temperature", "1.5", "--seed", "4") != sampled


def test_a_gguf_file_is_run_with_its_own_tokenizer(tmp_path: Path, run: Command) -> None:
    from ktk.transformers import load, load_tokenizer

    folder = tmp_path / "repository"
    folder.mkdir()
    path, _ = gguf_model.write(folder)
    done = run(str(path), "-p", PROMPT, "--greedy", "-n", "8", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["backends"] == ["LLAMAFILE"]
    tokenizer = load_tokenizer(path)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    made = load(path).generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
    assert document["text"] == tokenizer.decode(made, skip_special_tokens=True)
    assert (document["prompt_tokens"], document["tokens"]) == (ids.shape[1], len(made))
    # A repository of the hub that has such a file is the file.
    store(cache_folder(), "acme/tiny-GGUF", folder)
    named = run("acme/tiny-GGUF", "-p", PROMPT, "--greedy", "-n", "8", "--json")
    assert named.returncode == 0, named.stderr
    assert json.loads(named.stdout)["text"] == document["text"]


def test_a_name_of_the_hub_is_run_from_the_cache(model: Path, expected: str, run: Command) -> None:
    store(cache_folder(), "acme/tiny", model)
    done = run("acme/tiny", "-p", PROMPT, "--greedy", "-n", str(TOKENS))
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
    away = run("acme/other", "-p", PROMPT)
    assert (away.returncode, away.stdout) == (1, "")
    assert "download it: hf download acme/other" in away.stderr


@pytest.mark.slow
def test_ctrl_c_ends_the_reply_and_keeps_what_was_said(model: Path) -> None:
    arguments = ["run", str(model), "-p", PROMPT, "--greedy", "-n", "8000"]
    with Terminal(arguments) as terminal:
        terminal.wait_for("pert")
        terminal.type("\x03")
        assert terminal.status() == 130
        assert "; interrupted" in terminal.seen
        assert "Traceback" not in terminal.seen


@pytest.mark.slow
def test_a_reader_that_went_away_ends_the_reply_quietly(model: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ktk", "run", str(model), "-p", PROMPT, "-n", "8000"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_packed_files_take_the_rest_from_their_source(
    model: Path, tmp_path: Path, command: Command, run: Command
) -> None:
    source = tmp_path / "tiny"
    source.symlink_to(model)
    for folder in (tmp_path / "packed", tmp_path / "elsewhere" / "packed"):
        folder.parent.mkdir(exist_ok=True)
        made = command("convert", str(source), str(folder), "--backend", "AMXINT8")
        assert made.returncode == 0, made.stderr
    beside = run(str(tmp_path / "packed"), "-p", PROMPT, "--greedy", "-n", "8", "--json")
    assert json.loads(beside.stdout)["backends"] == ["AMXINT8"]
    away = str(tmp_path / "elsewhere" / "packed")
    refused = run(away, "-p", PROMPT)
    assert refused.returncode == 1
    assert "--source" in refused.stderr
    other = str(text_models.write(tmp_path / "other", num_experts=8))
    refused = run(str(tmp_path / "packed"), "-p", PROMPT, "--source", other)
    assert refused.returncode == 1
    assert "num_experts 4, but 8 is asked for: is it of another model?" in refused.stderr
    named = run(away, "-p", PROMPT, "--greedy", "-n", "8", "--json", "--source", str(source))
    assert json.loads(named.stdout)["text"] == json.loads(beside.stdout)["text"]


def test_defaults_of_the_configuration_hold(
    model: Path, monkeypatch: pytest.MonkeyPatch, run: Command
) -> None:
    monkeypatch.setenv("KTK_BACKEND", "AMXINT8")
    monkeypatch.setenv("KTK_THREADS", "1")
    monkeypatch.setenv("KTK_MODELS", str(model.parent))
    document = json.loads(run(model.name, "-p", PROMPT, "-n", "2", "--json").stdout)
    assert (document["backends"], document["threads"]) == (["AMXINT8"], 1)
    document = json.loads(run(model.name, "-p", "x", "-n", "2", "--json", "-b", "bf16").stdout)
    assert document["backends"] == ["BF16"]


def test_dense_layers_and_the_head_are_packed_where_that_is_asked_for(
    model: Path, run: Command
) -> None:
    arguments = (str(model), "-p", PROMPT, "--greedy", "-n", "4", "--json")
    plain = json.loads(run(*arguments).stdout)["bytes_per_token"]
    packed = run(*arguments, "--linears", "AMXINT8", "--head", "AMXINT8")
    reads = json.loads(packed.stdout)["bytes_per_token"]
    assert reads["experts"] == plain["experts"]
    # A byte and a part of a scale for two; norms and routers stay.
    assert 0.5 <= reads["head"] / plain["head"] < 0.6
    assert 0.5 <= reads["linears"] / plain["linears"] < 0.7
    assert reads["other"] == plain["other"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["{model}"], "the prompt is empty"),
        (["{model}", "-p", " "], "the prompt is empty"),
        (["{model}", "-p", "a\udcff"], "the prompt is not text in UTF-8"),
        (["{model}", "-p", "x", "--system", "a\udcff"], "--system is not text in UTF-8"),
        (["{model}", "-p", "x", "-b", "AMXINT9"], "no backend 'AMXINT9'"),
        (["{model}", "-p", "x", "--threads", "100000"], "100000 threads are more than a machine"),
        (["{model}/..", "-p", "x"], "config.json is missing: not a checkpoint folder"),
        (["acme/moe", "-p", "x"], "hf download acme/moe"),
        (["{model}", "-p", "x" * 9000], "the context of this model ends at 8192"),
        (["{model}", "-p", "x", "--source", "{model}"], "--source"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    model: Path, arguments: list[str], what: str, run: Command
) -> None:
    done = run(*(text.replace("{model}", str(model)) for text in arguments))
    assert (done.returncode, done.stdout) == (1, "")
    assert what in done.stderr
    assert done.stderr.count("\n") == 1


def test_options_that_would_do_nothing_are_refused(run: Command) -> None:
    done = run("m", "-p", "x", "--greedy", "--temperature", "0.7")
    assert done.returncode == 2
    assert "--temperature and --top-p do nothing" in " ".join(done.stderr.split())


def test_a_folder_without_a_tokenizer_says_so(model: Path, tmp_path: Path, run: Command) -> None:
    for path in model.iterdir():
        if "token" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    done = run(str(tmp_path), "-p", PROMPT)
    assert f"{tmp_path} has no tokenizer" in done.stderr


@pytest.mark.parametrize(
    ("file", "key", "value", "what"),
    [
        ("config.json", "num_experts_per_tok", "2", "expected int, got str (value: '2')"),
        ("config.json", "hidden_act", "silo", "makes no model: KeyError: 'silo'"),
        ("config.json", "num_key_value_heads", 0, "makes no model: ZeroDivisionError"),
        ("config.json", "model_type", "qwen9", "`qwen9`"),
        ("config.json", None, [], "config.json cannot be read: it is [], expected an object"),
        ("generation_config.json", None, None, "cannot be read: it is None, expected an object"),
        ("generation_config.json", "eos_token_id", [], "says eos_token_id [], which should be"),
        ("generation_config.json", "temperature", "0.5", "temperature '0.5', which should be a"),
        ("generation_config.json", "max_new_tokens", "x", "max_new_tokens 'x', which should be a"),
        ("generation_config.json", "stop_strings", ["a", 5], "['a', 5], which should be a text"),
        ("tokenizer.json", "normalizer", {"type": "Of2027"}, "its tokenizer cannot be read: data"),
    ],
)
def test_a_wrong_value_in_a_file_is_one_line_that_names_it(
    model: Path, tmp_path: Path, run: Command, file: str, key: str | None, value: Any, what: str
) -> None:
    folder = tmp_path / "wrong"
    shutil.copytree(model, folder)
    known = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**known, key: value} if key else value))
    done = run(str(folder), "-p", "x", "-n", "2")
    assert (done.returncode, done.stdout) == (1, "")
    assert what in done.stderr
    assert done.stderr.startswith(f"ktk: {folder}") or key == "model_type"
    assert done.stderr.count("\n") == 1


def test_a_tokenizer_that_was_cut_off_is_named(model: Path, tmp_path: Path, run: Command) -> None:
    folder = tmp_path / "wrong"
    shutil.copytree(model, folder)
    (folder / "tokenizer.json").write_text((model / "tokenizer.json").read_text()[:100])
    done = run(str(folder), "-p", "x", "-n", "2")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"ktk: {folder}: its tokenizer cannot be read: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["run", "chat"])
def test_bytes_that_are_no_text_are_one_line(model: Path, what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ktk", what, str(model), "-n", "2"],
        input=b"Gr\xfc\xdfe\n",
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
    )
    assert done.returncode == (1 if what == "run" else 0), done.stderr
    [line] = [line for line in done.stderr.decode().splitlines() if "UTF-8" in line]
    assert line.startswith("ktk: the prompt is not text in UTF-8")


def test_a_prompt_in_the_locale_c_is_read(model: Path, run: Command) -> None:
    escaped = "Grüße".encode().decode("ascii", "surrogateescape")
    texts = [
        json.loads(run(str(model), "-p", one, "--greedy", "-n", "8", "--json").stdout)["text"]
        for one in (escaped, "Grüße")
    ]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_missing_package_is_one_line_with_what_installs_it(model: Path) -> None:
    program = (
        "import sys\n"
        "class No:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'transformers':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, No())\n"
        f"sys.argv = ['ktk', 'run', {str(model)!r}, '-p', 'x']\n"
        "from ktk.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'ktk[run]'" in done.stderr


def test_a_terminal_is_given_no_commands() -> None:
    assert visible("a\x1b[2Jb\x07\r\x9bc\td\n") == "a\ufffd[2Jb\ufffd\ufffd\ufffdc\td\n"
    assert visible("Grüße, 你好") == "Grüße, 你好"


@pytest.mark.parametrize(("own", "used"), [(None, "passive"), ("active", "active")])
def test_openmp_hears_how_to_wait_before_torch_is_there(own: str | None, used: str) -> None:
    # An object in the place of torch that tells what the environment was when it was looked for.
    program = (
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': sys.exit(os.environ.get('OMP_WAIT_POLICY', 'not set'))\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from ktk.__main__ import main\n"
        "sys.argv = ['ktk', 'run', 'not-there', '-p', 'x']\n"
        "main()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if own is None else {"OMP_WAIT_POLICY": own}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.splitlines()[-1].endswith(f": {used}")
