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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ktk.checkpoint.detect import is_packed
from ktk.checkpoint.open import open_checkpoint
from ktk.errors import CheckpointError
from ktk.packed.durable import LOCK, TEMPORARY, locked, remove_temporaries, write_file
from ktk.packed.encode import Encoder, plan_layer
from ktk.packed.fingerprint import fingerprint
from ktk.packed.folder import Index, file_of, read_index, write_index
from ktk.packed.header import Header
from ktk.packed.read import DamagedLayer, open_layer, verify
from ktk.packed.write import LayerWriter, file_size
from ktk.registry import load_backend

if TYPE_CHECKING:
    from ktk.backend import Backend

logger = logging.getLogger(__name__)

# Each thread holds an expert, decoded to f32 at worst.
_MOST_THREADS = 32
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


class Conversion:
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
    resume : bool
        Keep the layers that an earlier conversion with the same arguments finished, if they are
        still what was written: they are read to see that. Layers may be added.
    threads : int, optional
        Experts that are encoded at a time; by default one for each CPU of this process. The files
        do not depend on it.

    Attributes
    ----------
    plans : list of FilePlan
        The layers, from `with` on.

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
        resume: bool = False,
        threads: int | None = None,
    ) -> None:
        self.source, self.output = Path(source), Path(output)
        self.backend = load_backend(backend) if isinstance(backend, str) else backend
        self.group_size = group_size
        self.threads = _threads(threads)
        self.plans: list[FilePlan] = []
        self._wanted = None if layers is None else sorted(set(map(operator.index, layers)))
        if self._wanted == []:
            raise ValueError("layers is empty: expected at least one layer, or None for all")
        self._resume = resume
        self._stack = ExitStack()

    def __enter__(self) -> Conversion:
        with ExitStack() as stack:
            self._checkpoint = stack.enter_context(open_checkpoint(self.source))
            # Everything that can be wrong with the source, before the first write.
            encoders = self._encoders()
            source = fingerprint(self._checkpoint.files())
            try:
                self._begin(encoders, source, stack)
            except OSError as error:
                raise CheckpointError(f"{self.output} cannot be written: {error}") from error
            self._stack = stack.pop_all()
        return self

    def _begin(self, encoders: list[Encoder], source: str, stack: ExitStack) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        stack.enter_context(locked(self.output))
        index = self._index(encoders, source)
        remove_temporaries(self.output)
        self.plans = [self._plan(encoder, source) for encoder in encoders]
        self._check_space()
        write_index(self.output, index)
        self._copy_config()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def todo(self) -> list[FilePlan]:
        """The layers that are not there yet."""
        return [plan for plan in self.plans if not plan.done]

    def run(self) -> Iterator[FilePlan]:
        """Write what is missing; yields the layer after each expert.

        Raises
        ------
        CheckpointError
            The disk is full, or an expert damaged. Finished layers stay.
        """
        with ThreadPoolExecutor(self.threads, "ktk-convert") as pool:
            for plan in self.todo:
                logger.info("layer %d: %s", plan.encoder.number, plan.encoder.how)
                try:
                    yield from self._write(plan, pool)
                except OSError as error:
                    raise CheckpointError(self._failure(plan, error)) from error

    def _write(self, plan: FilePlan, pool: ThreadPoolExecutor) -> Iterator[FilePlan]:
        writer = LayerWriter(plan.path, plan.header)
        experts = plan.header.layout.config.num_experts

        def make(expert: int) -> None:
            writer.put(expert, plan.encoder.expert(expert))

        tasks = [pool.submit(make, expert) for expert in range(experts)]
        try:
            for done, task in enumerate(as_completed(tasks), 1):
                task.result()
                if done % self.threads == 0:
                    # Files that were read count as memory of this process.
                    self._checkpoint.release()
                yield plan
            writer.commit()
        except BaseException:
            for task in tasks:
                task.cancel()
            # Those that run already still write to the file.
            for task in tasks:
                if not task.cancelled():
                    task.exception()
            writer.discard()
            raise

    # --- before the first write -----------------------------------------------------------------

    def _encoders(self) -> list[Encoder]:
        there = self._checkpoint.layers()
        wanted = there if self._wanted is None else self._wanted
        missing = [layer for layer in wanted if layer not in there]
        if missing or not wanted:
            raise CheckpointError(
                f"{self.source} has no experts that ktk knows by name"
                + (f" in layer {missing[0]}" if missing else "")
            )
        return [plan_layer(self._checkpoint, n, self.backend, self.group_size) for n in wanted]

    def _index(self, encoders: list[Encoder], source: str) -> Index:
        """Return what the folder is to hold, what it holds already included."""
        mine = Index(
            backend=self.backend.name,
            group_size=self.group_size,
            source=source,
            source_name=self.source.name,
            layers=tuple(encoder.number for encoder in encoders),
        )
        if not is_packed(self.output):
            self._check_empty()
            return mine
        if not self._resume:
            raise CheckpointError(
                f"{self.output} holds a conversion already: go on with it by --resume, or choose "
                "another folder"
            )
        earlier = read_index(self.output)
        for what in ("backend", "group_size"):
            if getattr(earlier, what) != getattr(mine, what):
                raise CheckpointError(
                    f"{self.output} was begun with the {what} {getattr(earlier, what)}, not "
                    f"{getattr(mine, what)}: choose another folder"
                )
        if earlier.source != source:
            raise CheckpointError(
                f"{self.output} was begun from {earlier.source_name}, whose files were not those "
                f"of {self.source}: choose another folder"
            )
        return replace(earlier, layers=tuple(sorted({*earlier.layers, *mine.layers})))

    def _check_empty(self) -> None:
        """Refuse a folder with anything but what an interrupted start leaves."""
        foreign = [
            path.name
            for path in sorted(self.output.iterdir())
            if path.name != LOCK and not path.name.endswith(TEMPORARY)
        ]
        if foreign:
            raise CheckpointError(
                f"{self.output} is not empty, it holds {foreign[0]}: choose another folder"
            )

    def _plan(self, encoder: Encoder, source: str) -> FilePlan:
        header = Header(self.backend.name, encoder.number, source, encoder.layout)
        path = file_of(self.output, encoder.number)
        return FilePlan(encoder, header, path, done=path.exists() and _is_whole(path, header))

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
        resume=resume,
        threads=threads,
    ) as conversion:
        for _ in conversion.run():
            pass
        return conversion.plans


def _is_whole(path: Path, header: Header) -> bool:
    """Whether a file that an earlier run finished can stay; reads all of it."""
    try:
        layer = open_layer(path)
        if not layer.header.same_content(header):
            raise CheckpointError(f"{path} is of another conversion: remove it")
        verify(layer)
    except DamagedLayer as error:
        logger.warning("layer %d has to be converted again: %s", header.layer, error)
        return False
    return True


def _threads(wanted: int | None) -> int:
    if wanted is None:
        return min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    if operator.index(wanted) < 1:
        raise ValueError(f"threads must be at least 1, got {wanted}")
    return wanted


def gigabytes(nbytes: int) -> str:
    """Write a size for people."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
