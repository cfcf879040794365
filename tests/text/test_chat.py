"""`ktk chat`: turns, what is computed again, Ctrl-C, and what is kept."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import text_models
import transformers
from terminal import Command, Terminal
from transformers import Qwen3MoeForCausalLM

from ktk.errors import CheckpointError
from ktk.text.interrupt import Interrupt, Leave
from ktk.text.run import visible
from ktk.text.transcript import Transcript

FIRST, SECOND = "What is the capital of France?", "And of Italy?"
SHORT = ("--greedy", "-n", "12")


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def said(path: Path) -> list[tuple[str, str]]:
    return [(one["role"], one["content"]) for one in entries(path) if "role" in one]


def kept(tmp_path: Path) -> Path:
    [path] = (tmp_path / "state" / "ktk" / "chats").iterdir()
    return path


def test_a_pipe_is_answered_line_by_line(model: Path, tmp_path: Path, command: Command) -> None:
    done = command("chat", str(model), *SHORT, text=f"{FIRST}\n\n{SECOND}\n")
    assert done.returncode == 0, done.stderr
    path = kept(tmp_path)
    [(_, one), (_, first), (_, two), (_, second)] = said(path)
    assert [one, two] == [FIRST, SECOND]
    # Nothing but replies.
    assert done.stdout == f"{first}\n{second}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert entries(path)[0]["model"] == str(model)
    # The conversation so far was not computed again: its tokens are the beginning of the prompt.
    [report] = [line for line in done.stderr.splitlines() if " kept)" in line]
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    history = [
        {"role": "user", "content": FIRST},
        {"role": "assistant", "content": first},
        {"role": "user", "content": SECOND},
    ]
    prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True)["input_ids"]
    assert f"prompt {len(prompt)} tokens (" in report


def test_a_reply_is_the_same_with_what_is_kept_and_without(
    model: Path, tmp_path: Path, command: Command
) -> None:
    command("chat", str(model), *SHORT, text=f"{FIRST}\n{SECOND}\n")
    path = kept(tmp_path)
    whole = said(path)
    # All but the last reply, in a file that is gone on with: everything is computed anew.
    lines = path.read_text().splitlines(keepends=True)
    again = tmp_path / "again.jsonl"
    again.write_text("".join(lines[:3]))
    done = command("chat", str(model), *SHORT, "--transcript", str(again), text=f"{SECOND}\n")
    assert " kept)" not in done.stderr
    assert said(again) == whole


@pytest.mark.slow
def test_a_terminal_shows_turns_and_ctrl_c_ends_a_reply_only(model: Path, tmp_path: Path) -> None:
    with Terminal(["chat", str(model), "--greedy", "-n", "8000"]) as terminal:
        at = terminal.wait_for("> ")
        terminal.type("/help\n")
        at = terminal.wait_for("/clear  begin a new conversation", after=at)
        at = terminal.wait_for("> ", after=at)
        terminal.type(FIRST + "\n")
        at = terminal.wait_for("The", after=at)
        terminal.type("\x03")
        at = terminal.wait_for("; interrupted", after=at)
        at = terminal.wait_for("> ", after=at)
        terminal.type("/clear\n")
        at = terminal.wait_for("> ", after=at)
        terminal.type("/nothing\n")
        at = terminal.wait_for("there is no command /nothing", after=at)
        at = terminal.wait_for("> ", after=at)
        assert terminal.interrupt() == 0, terminal.seen
    assert "Traceback" not in terminal.seen
    path = kept(tmp_path)
    [(_, question), (_, reply)] = said(path)
    assert question == FIRST
    # What the screen showed is what was kept; it also shows that Ctrl-C was pressed.
    shown = terminal.seen.replace("^C", "").partition(FIRST + "\n")[2]
    assert shown.startswith(visible(reply) + "\nprompt ")
    assert entries(path)[2]["finish"] == "interrupted"
    assert entries(path)[-1]["clear"]


@pytest.mark.slow
def test_ctrl_c_again_leaves(model: Path) -> None:
    with Terminal(["chat", str(model), "--greedy", "-n", "8000"]) as terminal:
        terminal.wait_for("> ")
        terminal.type(FIRST + "\n")
        terminal.wait_for("The")
        # In the reply, or where nothing is being said any more.
        terminal.type("\x03")
        time.sleep(0.1)
        assert terminal.interrupt() == 0, terminal.seen
    assert "Traceback" not in terminal.seen


def test_what_ctrl_c_does_depends_on_when() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt(lambda: True) as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.asked, "the reply is to end, and is not torn"
        with pytest.raises(Leave):
            signal.raise_signal(signal.SIGINT)
    with Interrupt(lambda: False), pytest.raises(KeyboardInterrupt) as caught:
        signal.raise_signal(signal.SIGINT)
    assert caught.type is KeyboardInterrupt, "a prompt that takes long is given up, not the chat"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_question_that_is_given_up_does_not_count(
    model: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = Qwen3MoeForCausalLM.forward
    calls: list[int] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:  # the prompt, before the first token
            signal.raise_signal(signal.SIGINT)
        return stock(*args, **kwargs)

    monkeypatch.setattr(Qwen3MoeForCausalLM, "forward", forward)
    done = command("chat", str(model), *SHORT, text=f"{SECOND}\n{FIRST}\n")
    assert done.returncode == 0
    assert "the question is forgotten" in done.stderr
    with Transcript(kept(tmp_path), "m") as again:
        assert [one["role"] for one in again.messages] == ["user", "assistant"]
        assert again.messages[0]["content"] == FIRST


@pytest.mark.slow
def test_ctrl_d_leaves(model: Path) -> None:
    with Terminal(["chat", str(model)]) as terminal:
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.status() == 0


def test_a_system_prompt_comes_first_and_again_after_clear(
    model: Path, tmp_path: Path, command: Command
) -> None:
    text = f"{FIRST}\n/clear\n{SECOND}\n/exit\nnever\n"
    done = command("chat", str(model), *SHORT, "--system", "Be brief.", text=text)
    assert done.returncode == 0
    roles = [role for role, _ in said(kept(tmp_path))]
    assert roles == ["system", "user", "assistant"] * 2
    assert "never" not in kept(tmp_path).read_text()


def test_a_full_context_ends_no_chat(model: Path, tmp_path: Path, command: Command) -> None:
    text = f"{'x' * 9000}\n{FIRST}\n"
    done = command("chat", str(model), *SHORT, text=text)
    assert done.returncode == 0
    assert "model ends at 8192; /clear begins a new conversation" in done.stderr
    assert [role for role, _ in said(kept(tmp_path))][-2:] == ["user", "assistant"]


def test_a_line_that_is_no_text_ends_no_chat(model: Path, tmp_path: Path, command: Command) -> None:
    done = command("chat", str(model), "-n", "4", text="a\udcff\nhello\n")
    assert done.returncode == 0, done.stderr
    assert "the prompt is not text in UTF-8" in done.stderr
    assert done.stdout.strip()
    done = command("chat", str(model), "--system", "a\udcff", text="hello\n")
    assert done.returncode == 1
    assert "--system is not text in UTF-8" in done.stderr


@pytest.mark.slow
def test_a_terminal_that_wants_no_color_gets_none(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with Terminal(["chat", str(model)], kind="xterm-256color") as terminal:
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.status() == 0
    assert "\033[1" not in terminal.seen


def test_a_model_that_cannot_chat_says_so_at_once(tmp_path: Path, command: Command) -> None:
    plain = text_models.write(tmp_path / "plain", template=None)
    done = command("chat", str(plain), text=FIRST)
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no chat template" in done.stderr
    assert not (tmp_path / "state").exists() or not list((tmp_path / "state").rglob("*.jsonl"))


def test_what_cannot_be_kept_is_said_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be kept in .*: Not a dir.*; --transcript"):
        Transcript(tmp_path / "file" / "folder" / "chat.jsonl", "m")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # root may write anywhere
        with pytest.raises(CheckpointError, match=r"cannot be kept in .*: Permission denied; --tr"):
            Transcript(tmp_path / "chat.jsonl", "m")
    with pytest.raises(CheckpointError, match="/dev/null is no regular file: --transcript names"):
        Transcript(Path("/dev/null"), "m")
    with pytest.raises(CheckpointError, match="is a folder: --transcript names a file"):
        Transcript(tmp_path, "m")


def test_a_transcript_survives_what_cuts_it_off(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    with Transcript(path, "m") as first:
        first.add({"role": "user", "content": "a"})
        first.add({"role": "assistant", "content": "b"}, tokens=1)
        first.add({"role": "user", "content": "unanswered"})
    # A process that was killed in the middle of a line.
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"role": "assistant", "cont')
    with Transcript(path, "m") as second:
        assert [one["content"] for one in second.messages] == ["a", "b"]
        assert path.read_bytes() == whole
        second.add({"role": "user", "content": "c"})
    with Transcript(path, "m") as third:
        third.add({"role": "user", "content": "d"})
        third.add({"role": "assistant", "content": "e"})
    # Templates want turns: questions without an answer do not count.
    assert [one["content"] for one in Transcript(path, "m").messages] == ["a", "b", "d", "e"]


def test_each_message_is_on_the_disk_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    path = tmp_path / "chat.jsonl"
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_bytes()))
    with Transcript(path, "m") as transcript:
        assert not path.exists()
        for content in ("a", "b"):
            transcript.add({"role": "user", "content": content})
            assert synced[-1].endswith(b"\n")
            assert json.loads(synced[-1].splitlines()[-1])["content"] == content


@pytest.mark.parametrize(
    "text", ["no JSON\n", "[1]\n", '{"role": "judge", "content": "x"}\n', '{"role": "user"}\n']
)
def test_another_file_is_no_transcript(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="is no transcript of ktk chat: see its line 1"):
        Transcript(path, "m")
    assert path.read_text() == text
