"""A whole model: tokens per second of a prompt and of a reply, and the experts' share of the time.

What computes which part is as in `ktk run`. What a token reads of weights, at the rate that memory
was seen to have, is the least time of a step that makes one token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import torch
from rich.markup import escape
from rich.table import Table

from ktk.bench.limits import LimitProbe
from ktk.bench.verdict import HIGHEST_FRACTION
from ktk.pool import default_pool
from ktk.terminal import plain_table
from ktk.text.graphs import Step, captures, room_for, static_cache
from ktk.text.load import Loaded
from ktk.text.threads import FewThreads
from ktk.transformers.packed import packed_modules
from ktk.transformers.traffic import ON_GPU

# Steps of a reply in one turn, after some that fill caches and let threads start.
_STEPS, _WARM = 32, 4
# Steps after these, in which experts are watched.
_WATCHED = 8
# One look at the rate of reading.
_LOOK = 0.1


@dataclass(frozen=True)
class Measured:
    """One kind of work, the median of several turns.

    Attributes
    ----------
    phase
        "prefill" or "decode".
    tokens
        Of a call.
    seconds
        Of a call.
    tokens_per_second
        Over all of it.
    experts_share
        Of the time, spent in layers of experts.
    of_limit
        The time that reading the weights takes at least, as a share of `seconds`; None for
        prefill, and where the machine was slower while that was looked at.
    """

    phase: str
    tokens: int
    seconds: float
    tokens_per_second: float
    experts_share: float
    of_limit: float | None = None


class Stopwatch:
    """A context manager that adds up the time spent in the modules of experts of a model.

    Modules that are watched are called one by one, where ktk would compute a token's router and
    experts in one call, and a GPU is waited for around each: such a step takes longer.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        modules = dict(model.named_modules())
        self._watched = [modules[name] for name in packed_modules(model)]
        self._hooks: list[Any] = []
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> Self:
        for module in self._watched:
            self._hooks.append(module.register_forward_pre_hook(self._begin))
            self._hooks.append(module.register_forward_hook(self._end))
        return self

    def __exit__(self, *_: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _begin(self, *_: Any) -> None:
        _wait(self._model)
        self._began = time.perf_counter()

    def _end(self, *_: Any) -> None:
        _wait(self._model)
        self.seconds += time.perf_counter() - self._began

    def time(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Return the seconds of a call, and how many of these are the experts'."""
        self.seconds = 0.0
        began = time.perf_counter()
        call()
        return time.perf_counter() - began, self.seconds


def measure(
    loaded: Loaded, prompts: Sequence[int], rounds: int, on_step: Callable[[str], None]
) -> list[Measured]:
    """Time prompts of some lengths, and steps of one token behind the first of these.

    Parameters
    ----------
    loaded
        The model.
    prompts
        Lengths in tokens.
    rounds
        Turns of everything; medians are returned.
    on_step
        Called with what is done next.

    Raises
    ------
    ValueError
        A prompt and the steps after it do not fit the model's context.
    """
    model = loaded.model
    config = model.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None)
    behind = _WARM + _STEPS + _WATCHED
    needed = max(prompts) + behind
    if context is not None and needed > context:
        raise ValueError(f"{needed} tokens are needed, and the context of this model has {context}")
    # As `ktk run` computes; but what is watched is not captured.
    fixed = captures(model)
    watch = Stopwatch(model)
    generator = torch.Generator().manual_seed(0)
    pool = default_pool()
    probe = LimitProbe(pool.size, cpus=pool.cpus)
    probe.read(_LOOK)  # makes its buffer
    reads: list[float] = []
    prefill: dict[int, list[tuple[float, float]]] = {length: [] for length in prompts}
    decode: list[float] = []
    share: list[tuple[float, float]] = []
    with FewThreads(model), torch.inference_mode():
        for turn in range(rounds + 1):
            for length in prompts:
                on_step(f"prompt of {length} tokens, turn {turn} of {rounds}")
                ids = torch.randint(
                    config.vocab_size, (1, length), generator=generator, device="cpu"
                )
                ids = ids.to(loaded.device)
                state: dict[str, Any] = {}
                if fixed:
                    state["cache"] = static_cache(model, room_for(length + behind, context))
                with watch:
                    took = watch.time(partial(_forward, model, ids, state))
                # The first turn is for caches and threads.
                if turn:
                    prefill[length].append(took)
                if length == prompts[0]:
                    on_step(f"{_STEPS} tokens after it")
                    reads.append(probe.read(_LOOK))
                    step = partial(_forward, model, None, state)
                    quick = partial(_forward, Step(model) if fixed else model, None, state)
                    times = [watch.time(quick)[0] for _ in range(_WARM + _STEPS)]
                    reads.append(probe.read(_LOOK))
                    with watch:
                        watched = [watch.time(step) for _ in range(_WATCHED)]
                    if turn:
                        decode += times[_WARM:]
                        share += watched
    found = [
        _measured("prefill", length, [total for total, _ in times], times)
        for length, times in prefill.items()
    ]
    here = sum(nbytes for part, nbytes in loaded.reads.items() if part != ON_GPU)
    least = here / statistics.median(reads)
    return [*found, _measured("decode", 1, decode, share, least)]


def _forward(model: Any, ids: torch.Tensor | None, state: dict[str, Any]) -> None:
    """Compute tokens behind those of `state`, by default the next one; the one after goes there."""
    made = model(
        input_ids=state["next"] if ids is None else ids,
        past_key_values=state.get("cache"),
        use_cache=True,
        logits_to_keep=1,
    )
    state["cache"] = made.past_key_values
    # In f32, as generation of transformers chooses; of bf16 torch takes five times as long.
    state["next"] = made.logits[:, -1:].float().argmax(dim=-1)
    _wait(state["next"])


def _wait(where: Any) -> None:
    """Wait for the GPU that has a model or a tensor, if one has."""
    if where.device.type != "cpu":
        torch.cuda.synchronize(where.device)


def _measured(
    phase: str,
    tokens: int,
    times: list[float],
    watched: list[tuple[float, float]],
    least: float | None = None,
) -> Measured:
    seconds = statistics.median(times)
    share = sum(inside for _, inside in watched) / sum(total for total, _ in watched)
    fraction = None if least is None else least / seconds
    if fraction is not None and fraction > HIGHEST_FRACTION:
        fraction = None
    return Measured(phase, tokens, seconds, tokens / seconds, share, fraction)


def documents(loaded: Loaded, found: list[Measured]) -> list[dict[str, Any]]:
    """Return what `--json` prints, a line each."""
    about = {
        "model": loaded.name,
        "backends": list(loaded.backends),
        "threads": loaded.threads,
        "device": loaded.device,
        "bytes_per_token": loaded.reads,
    }
    return [{**about, **asdict(one)} for one in found]


def table_of(loaded: Loaded, found: list[Measured]) -> Table:
    """Return the same for people."""
    by = ", ".join(loaded.backends) or "no backend"
    rest = "" if loaded.device == "cpu" else f", all else on {loaded.device}"
    name = escape(loaded.name)
    table = plain_table(f"{name}, experts by {by}, {loaded.threads} threads{rest}")
    for heading in ("", "tokens", "tokens/s", "ms", "experts", "of limit"):
        table.add_column(heading, justify="right" if heading else "left")
    for one in found:
        table.add_row(
            one.phase,
            str(one.tokens),
            f"{one.tokens_per_second:.4g}",
            f"{one.seconds * 1e3:.4g}",
            f"{one.experts_share:.0%}",
            "-" if one.of_limit is None else f"{one.of_limit:.0%}",
        )
    return table
