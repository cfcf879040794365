"""Converts the experts of a checkpoint to what a backend stores, once and for all.

A few experts are in memory at a time. Each layer is a file that appears when it is complete, so
that a conversion can be stopped at any moment and taken up again; the source is only ever read.
"""

from __future__ import annotations

import errno
import logging
import operator
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktk.backend import Backend
from ktk.checkpoint.packed.folder import Index, file_of, write_index
from ktk.checkpoint.packed.header import Header
from ktk.checkpoint.packed.write import LayerWriter, file_size
from ktk.checkpoint.pieces import digest
from ktk.closing import Closing
from ktk.conversion.encode import Encoder, plan_layer
from ktk.conversion.resume import is_current, joined, merged, read_of, whole
from ktk.conversion.source import Source, name_of
from ktk.conversion.stamps import SourceChange
from ktk.durable import locked, remove_temporaries, write_file
from ktk.errors import CheckpointError
from ktk.loading.route import format_named_by
from ktk.registry import load_backend
from ktk.sizes import gigabytes

logger = logging.getLogger(__name__)

# Each thread holds an expert, decoded to f32 at worst.
_MOST_THREADS = 32
# A source that changes more often than this during a conversion is not finished itself.
_MOST_CHANGES = 3
_CONFIG = "config.json"


@dataclass(frozen=True)
class FilePlan:
    """What is to become of a layer; `done` if an earlier run made its file."""

    encoder: Encoder
    header: Header
    path: Path
    done: bool

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return file_size(self.header)


class Conversion(Closing):
    """A conversion that holds its output folder from `with` on.

    Parameters
    ----------
    source : path
        A checkpoint as `ktk.MoE.from_checkpoint` takes it.
    output : path
        The folder to write. It must be new or empty, unless `resume` is set.
    backend : str or Backend
        What the weights are for.
    group_size : int, optional
        Columns per scale, 0 for whole rows; by default as the source has them, or as the backend
        likes best.
    layers : sequence of int, optional
        By default all that have experts.
    module, activation, top_k : optional
        As of `ktk.MoE.from_checkpoint`.
    resume : bool
        Keep the layers that an earlier conversion with the same arguments finished, if they are
        still what was written, and made of what the source holds now. Their files are read to see
        that. The source's files are read only where their size, times or inode are not what they
        were (a copy on another machine, say): then each layer's part is compared with a checksum.
        Layers may be added.
    threads : int, optional
        Experts that are encoded at a time; by default one for each CPU of this process. The files
        do not depend on it.
    on_look : function of int, optional
        Called with the number of a layer, after what an earlier run made of it was looked at.

    Attributes
    ----------
    plans : list of FilePlan
        The layers, from `with` on.
    expected : int
        Bytes to be written, those included that a change of the source makes again.

    Raises
    ------
    CheckpointError
        The source is incomplete or does not fit the backend; the output is not empty, of another
        conversion, on a disk that is too small, or being written by someone else.
    ValueError
        `threads` is less than 1, or `layers` is empty.
    """

    def __init__(
        self,
        source: str | Path,
        output: str | Path,
        *,
        backend: str | Backend,
        group_size: int | None = None,
        layers: Sequence[int] | None = None,
        module: str | None = None,
        activation: str | None = None,
        top_k: int | None = None,
        resume: bool = False,
        threads: int | None = None,
        on_look: Callable[[int], None] = lambda layer: None,
    ) -> None:
        self.source, self.output = Path(source), Path(output)
        self.backend = load_backend(backend) if isinstance(backend, str) else backend
        self._named = format_named_by(backend)
        self.group_size = group_size
        self.threads = thread_count(threads)
        self.plans: list[FilePlan] = []
        self.expected = 0
        self._wanted = None if layers is None else sorted(set(map(operator.index, layers)))
        if self._wanted == []:
            raise ValueError("layers is empty: expected at least one layer, or None for all")
        self._reading: dict[str, Any] = {"module": module, "activation": activation, "top_k": top_k}
        self._resume = resume
        self._on_look = on_look
        self._written: set[int] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Conversion:
        with ExitStack() as stack:
            # Everything that can be wrong with the source is found before the first write.
            self._source = Source(self.source, **self._reading)
            stack.callback(lambda: self._source.close())
            encoders = self._encoders(self._wanted)
            with self._writing():
                self.output.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.output))
                self._begin(encoders, resume=self._resume)
                self._copy_config()
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """Let go of the output folder, and close the source."""
        self._stack.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.output} cannot be written: {error}") from error

    def _begin(self, encoders: list[Encoder], *, resume: bool) -> None:
        """Plan what is to be written, and remove what is there of an older source."""
        mine = Index(
            backend=self.backend.name,
            group_size=self.group_size,
            source=self._source.fingerprint,
            source_name=name_of(self.source),
            layers=tuple(encoder.number for encoder in encoders),
            stamps=self._source.stamps,
            activation=self._reading["activation"],
            top_k=self._reading["top_k"],
        )
        index = merged(self.output, mine, resume=resume)
        remove_temporaries(self.output)
        same = index.stamps == self._source.stamps
        self.plans = [self._plan(encoder, same=same) for encoder in encoders]
        if not same:
            # The stamps are for all layers of the folder.
            others = set(index.layers) - set(mine.layers)
            there = sorted(n for n in others if file_of(self.output, n).exists())
            plans = (self._plan(encoder, same=False) for encoder in self._encoders(there))
            self.plans = sorted(
                [*self.plans, *(plan for plan in plans if not plan.done)],
                key=lambda plan: plan.encoder.number,
            )
            self._source.check()
            # Nobody is to find layers of two sources side by side.
            for plan in self.todo:
                plan.path.unlink(missing_ok=True)
        self._check_space()
        write_index(self.output, replace(index, stamps=self._source.stamps))

    @property
    def todo(self) -> list[FilePlan]:
        """The layers that are not there before `run`."""
        return [plan for plan in self.plans if not plan.done]

    def run(self) -> Iterator[FilePlan]:
        """Write what is missing; yields the layer after each expert.

        Raises
        ------
        CheckpointError
            The disk is full, an expert damaged, or the source changes again and again. Finished
            layers stay.
        """
        self.expected = sum(plan.nbytes for plan in self.todo)
        with ThreadPoolExecutor(self.threads, "ktk-convert") as pool:
            for left in reversed(range(_MOST_CHANGES + 1)):
                try:
                    yield from self._write_all(pool)
                    return
                except SourceChange as change:
                    if not left:
                        raise SourceChange(
                            f"{change}, again and again; wait until nobody writes there, then go "
                            "on by --resume"
                        ) from change
                    logger.warning("%s: what was made of it is made again", change)
                    self._look_again()

    def _write_all(self, pool: ThreadPoolExecutor) -> Iterator[FilePlan]:
        for plan in self.todo:
            if plan.encoder.number in self._written:
                continue
            logger.info("layer %d: %s", plan.encoder.number, plan.encoder.how)
            try:
                yield from self._write(plan, pool)
            except OSError as error:
                raise CheckpointError(self._failure(plan, error)) from error
            except CheckpointError:
                # A file that is being written may look damaged.
                self._source.check()
                raise
            self._written.add(plan.encoder.number)
        self._source.check()

    def _look_again(self) -> None:
        """Open the source anew, and find out which layers were made of what it was before."""
        before, earlier = self._source.fingerprint, self.plans
        self._source.close()
        self._source = Source(self.source, **self._reading)
        encoders = self._encoders(self._wanted)
        if self._source.fingerprint != before:
            raise CheckpointError(
                f"{self.source} is not the checkpoint any more that {self.output} was begun from: "
                "choose another folder"
            )
        # Layers of this call are done by now as those of earlier runs are.
        with self._writing():
            self._begin(encoders, resume=True)
        done = {plan.encoder.number for plan in self.plans if plan.done}
        mine = {plan.encoder.number for plan in earlier if not plan.done}
        again = self._written - done
        self.expected += sum(p.nbytes for p in self.todo if p.encoder.number not in mine - again)
        self.plans = [
            replace(plan, done=plan.done and plan.encoder.number not in mine) for plan in self.plans
        ]
        self._written &= done

    def _sized(self, plan: FilePlan, pool: ThreadPoolExecutor) -> FilePlan:
        """Give a layer the room that its weights take, if that depends on them."""
        encoder = plan.encoder.sized(pool.map)
        sized = replace(plan, encoder=encoder, header=replace(plan.header, layout=encoder.layout))
        self.plans = [sized if one is plan else one for one in self.plans]
        self.expected += sized.nbytes - plan.nbytes
        return sized

    def _write(self, plan: FilePlan, pool: ThreadPoolExecutor) -> Iterator[FilePlan]:
        plan = self._sized(plan, pool)
        layer = plan.encoder.route.layer
        writer = LayerWriter(plan.path, plan.header)
        experts = plan.header.layout.config.num_experts
        read = [0] * experts

        def make(expert: int) -> None:
            read[expert] = digest(layer.pieces(expert))
            writer.put(expert, plan.encoder.expert(expert))

        tasks: list[Future[None]] = []
        done = 0
        try:
            for expert in range(experts):
                tasks.append(pool.submit(make, expert))  # noqa: PERF401 - where one fails, others are
            for done, task in enumerate(as_completed(tasks), 1):
                task.result()
                if done % self.threads == 0:
                    # Files that were read count as memory of this process.
                    self._source.checkpoint.close()
                yield plan
            self._source.check()
            writer.commit(joined(read))
        except BaseException:
            for task in tasks:
                task.cancel()
            # Those that run already still write to the file.
            for task in tasks:
                if not task.cancelled():
                    task.exception()
            writer.discard()
            self.expected += done * plan.nbytes // experts
            raise

    # --- before the first write -----------------------------------------------------------------

    def _encoders(self, wanted: Iterable[int] | None) -> list[Encoder]:
        checkpoint = self._source.checkpoint
        return [
            plan_layer(checkpoint, number, self.backend, self.group_size, self._named)
            for number in self._source.layers(wanted)
        ]

    def _plan(self, encoder: Encoder, *, same: bool) -> FilePlan:
        """Say what is to become of a layer; `same` if the source's stamps are those of before."""
        header = Header(self.backend.name, encoder.number, self._source.fingerprint, encoder.layout)
        path = file_of(self.output, encoder.number)
        if not path.exists():
            return FilePlan(encoder, header, path, done=False)
        found = whole(path, header)
        done = found is not None and (same or is_current(found, self._read(encoder), self.source))
        self._on_look(encoder.number)
        if done and found is not None:
            header = found.header
        return FilePlan(encoder, header, path, done=done)

    def _read(self, encoder: Encoder) -> Callable[[], int]:
        checkpoint = self._source.checkpoint
        return lambda: read_of(checkpoint, encoder.route.layer)

    def _check_space(self) -> None:
        needed = sum(plan.nbytes for plan in self.todo)
        free = shutil.disk_usage(self.output).free
        if needed > free:
            raise CheckpointError(
                f"{self.output} has {gigabytes(free)} free, and the conversion needs "
                f"{gigabytes(needed)}"
            )

    def _copy_config(self) -> None:
        found = self.source / _CONFIG
        if found.is_file():
            write_file(self.output / _CONFIG, found.read_bytes())

    def _failure(self, plan: FilePlan, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return (
                f"{self.output} is full: layer {plan.encoder.number} needs "
                f"{gigabytes(plan.nbytes)}. Finished layers are kept; make room and resume"
            )
        return f"layer {plan.encoder.number} could not be written to {self.output}: {error}"


def convert(
    source: str | Path,
    output: str | Path,
    *,
    backend: str | Backend,
    group_size: int | None = None,
    layers: Sequence[int] | None = None,
    module: str | None = None,
    activation: str | None = None,
    top_k: int | None = None,
    resume: bool = False,
    threads: int | None = None,
) -> list[FilePlan]:
    """Convert the experts of a checkpoint; parameters and errors as of `Conversion`.

    Returns
    -------
    list of FilePlan
        The layers that the folder now has of this call.
    """
    with Conversion(
        source,
        output,
        backend=backend,
        group_size=group_size,
        layers=layers,
        module=module,
        activation=activation,
        top_k=top_k,
        resume=resume,
        threads=threads,
    ) as conversion:
        for _ in conversion.run():
            pass
        return conversion.plans


def thread_count(wanted: int | None) -> int:
    """Return the experts that are encoded at a time; ValueError if less than one is wanted."""
    if wanted is None:
        return min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    if operator.index(wanted) < 1:
        raise ValueError(f"threads must be at least 1, got {wanted}")
    return wanted
