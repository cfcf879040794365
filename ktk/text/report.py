"""How fast a reply was: one line for people, or a document."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ktk.sizes import gigabytes, size_text
from ktk.text.generate import Reply
from ktk.text.load import Loaded

_ENDINGS = {
    "length": "; cut off there (--max-tokens)",
    "context": "; cut off there (the context of this model is full)",
    "interrupted": "; interrupted",
}


def peak_memory() -> int:
    """Return the most memory that this process had so far, bytes."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def rate(tokens: int, seconds: float) -> float | None:
    """Return tokens per second; None where there was nothing to measure."""
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def line(reply: Reply) -> str:
    """Say in one line what a reply took."""
    fresh = reply.prompt_tokens - reply.reused
    kept = f" ({reply.reused} kept)" if reply.reused else ""
    parts = [
        f"prompt {reply.prompt_tokens} tokens{kept}"
        + _speed(rate(fresh, reply.prefill_seconds if reply.tokens else 0)),
        f"reply {reply.tokens} tokens"
        + _speed(rate(reply.tokens - 1, reply.decode_seconds))
        + _ENDINGS.get(reply.finish, ""),
    ]
    return ", ".join(parts)


def loaded_line(loaded: Loaded) -> str:
    """Say in one line what was loaded, and what each token reads of it."""
    by = f"experts by {', '.join(loaded.backends)}" if loaded.backends else "no experts by ktk"
    if loaded.device != "cpu":
        by += f", all else on {loaded.device}"
    reads = [f"{part} {gigabytes(size)}" for part, size in loaded.reads.items() if size]
    return (
        f"loaded in {loaded.seconds:.1f} s, {by}, {loaded.threads} threads, "
        f"{size_text(peak_memory())} at most; a token reads {', '.join(reads)}"
    )


def document(loaded: Loaded, reply: Reply) -> dict[str, Any]:
    """Return the same as `--json` prints it."""
    fresh = reply.prompt_tokens - reply.reused
    return {
        "model": loaded.name,
        "path": str(loaded.path),
        "backends": list(loaded.backends),
        "threads": loaded.threads,
        "device": loaded.device,
        "text": reply.text,
        "finish": reply.finish,
        "prompt_tokens": reply.prompt_tokens,
        "tokens": reply.tokens,
        "load_seconds": loaded.seconds,
        "seconds": reply.prefill_seconds + reply.decode_seconds,
        "prefill": _phase(fresh if reply.tokens else 0, reply.prefill_seconds),
        "decode": _phase(max(reply.tokens - 1, 0), reply.decode_seconds),
        "peak_memory": peak_memory(),
        "bytes_per_token": loaded.reads,
    }


def _phase(tokens: int, seconds: float) -> dict[str, Any]:
    speed = rate(tokens, seconds)
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": speed}


def _speed(value: float | None) -> str:
    if value is None:
        return ""
    return f" at {value:.0f}/s" if value >= 100 else f" at {value:.3g}/s"
