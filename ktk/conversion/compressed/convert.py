"""Converts a checkpoint to one whose experts are in a format of compressed-tensors.

    ktk_conversion.json                what was begun; see `state`
    model-00001-of-00007.safetensors   appears when it is complete
    tokenizer.json ...                 as they were
    config.json                        with its quantization_config
    model.safetensors.index.json       the last: a folder without it is not finished

They are written in this order. Files of weights that are there already are read and compared with
their checksum before they are kept, and the bytes do not depend on interruptions and threads.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ktk.checkpoint.files import read_json
from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.checkpoint.safetensors.index import INDEX
from ktk.closing import Closing
from ktk.conversion.compressed.config import converted_config
from ktk.conversion.compressed.formats import target_of
from ktk.conversion.compressed.others import other_files
from ktk.conversion.compressed.plan import Plan, Unit, plan
from ktk.conversion.compressed.shard import Shard, ShardWriter
from ktk.conversion.compressed.state import State, take_over, write_state
from ktk.conversion.convert import thread_count
from ktk.conversion.source import Source, name_of
from ktk.conversion.stamps import SourceChange
from ktk.durable import locked, remove_temporaries, write_file
from ktk.errors import CheckpointError
from ktk.sizes import gigabytes
from ktk.system import give_memory_back

logger = logging.getLogger(__name__)

_CONFIG = "config.json"
_SHARD_NBYTES = 5_000_000_000


@dataclass(frozen=True)
class ShardPlan:
    """What is to become of a file; `done` if an earlier run made it."""

    shard: Shard
    units: tuple[Unit, ...]
    done: bool


class CheckpointConversion(Closing):
    """A conversion that holds its output folder from `with` on.

    Parameters
    ----------
    source : path
        A folder of safetensors files, its weights in any format that ktk reads. All but experts
        become floats: bf16, or f16 where config.json says float16.
    output : path
        The folder to write. It must be new or empty, unless `resume` is set.
    to : str
        int4, fp8, nvfp4 or mxfp4.
    group_size : int, optional
        Of int4: columns that share a scale, 0 for whole rows; by default the first of 128, 64 and
        32 that divides the sizes of the experts.
    resume : bool
        Keep the files that an earlier conversion with the same arguments finished, if they are
        still what was written. If files of the source have another time, size or inode than they
        had then, all is made again.
    threads : int, optional
        Experts that are encoded at a time; by default one for each CPU of this process.
    shard_nbytes : int
        Bytes of a file of weights, at most; one tensor may be larger.
    on_look : function of path, optional
        Called with each file that an earlier run made, after it was looked at.

    Attributes
    ----------
    files : list of ShardPlan
        The files of weights, from `with` on.
    target : Target
        What the experts become, from `with` on.
    layers : list of int
        The layers whose experts are converted, from `with` on.
    stored : str
        What the experts of the source are, from `with` on.
    decoded : int
        How many other matrices are stored in codes and decoded, from `with` on.

    Raises
    ------
    CheckpointError
        The source is incomplete, no folder of safetensors files, or does not fit the format; the
        output is not empty, of another conversion, on a disk that is too small, or being written by
        someone else.
    ValueError
        `threads` is less than 1.
    """

    def __init__(
        self,
        source: str | Path,
        output: str | Path,
        *,
        to: str,
        group_size: int | None = None,
        resume: bool = False,
        threads: int | None = None,
        shard_nbytes: int = _SHARD_NBYTES,
        on_look: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self.source, self.output = Path(source), Path(output)
        self.to, self.group_size = to, group_size
        self.threads = thread_count(threads)
        self.shard_nbytes = shard_nbytes
        self.files: list[ShardPlan] = []
        self.layers: list[int] = []
        self._others: list[Path] = []
        self.stored = ""
        self.decoded = 0
        self._resume = resume
        self._on_look = on_look
        self._stack = ExitStack()

    def __enter__(self) -> CheckpointConversion:
        with ExitStack() as stack:
            # Everything that can be wrong with the source is found before the first write.
            self._source = Source(self.source)
            stack.callback(self._source.close)
            planned = self._planned()
            self._others = list(other_files(self.source, self.output))
            with self._writing():
                self.output.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(self.output))
                self._begin(planned)
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """Let go of the output folder, and close the source."""
        self._stack.close()

    @property
    def todo(self) -> list[ShardPlan]:
        """The files of weights that are not there before `run`."""
        return [one for one in self.files if not one.done]

    @property
    def expected(self) -> int:
        """Bytes that `run` writes."""
        return sum(one.shard.nbytes for one in self.todo)

    def run(self) -> Iterator[tuple[Shard, int]]:
        """Write what is missing; yields the file, and bytes that were made of it.

        Raises
        ------
        CheckpointError
            The disk is full, a weight damaged or not finite, or the source changes. Finished files
            stay.
        """
        try:
            with ThreadPoolExecutor(self.threads, "ktk-convert") as pool:
                for one in self.todo:
                    with self._writing(one.shard):
                        yield from self._write(one, pool)
            with self._writing():
                self._finish()
        except SourceChange as change:
            raise SourceChange(
                f"{change}; wait until nobody writes there, then begin again by --resume"
            ) from change

    # --- before the first write -----------------------------------------------------------------

    def _planned(self) -> Plan:
        checkpoint = self._source.checkpoint
        if not isinstance(checkpoint, SafetensorsCheckpoint):
            raise CheckpointError(
                f"{self.source} is no folder of safetensors files as hubs have them: give the one "
                "that it was made from, which has attention and tokenizer, too"
            )
        self.layers = self._source.layers(None)
        self.stored = checkpoint.layer(self.layers[0]).storage.dtype
        try:
            self.target = target_of(self.to, checkpoint.config, self.group_size)
        except ValueError as error:
            raise CheckpointError(f"{self.source}: {error}") from None
        entries = read_json(self.source / _CONFIG)
        half = "float16" in (entries.get("dtype"), entries.get("torch_dtype"))
        dtype = torch.float16 if half else torch.bfloat16
        return plan(checkpoint, self.output, self.target, dtype, self.shard_nbytes)

    def _begin(self, planned: Plan) -> None:
        """Find out what is there, and remove what is of an older source."""
        source, target = self._source, self.target
        state = State(
            to=target.name,
            group_size=target.format.group_k,
            source=source.fingerprint,
            source_name=name_of(self.source),
            stamps=source.stamps,
        )
        same = take_over(self.output, state, resume=self._resume)
        remove_temporaries(self.output)
        if not same:
            # Nobody is to find weights of two sources side by side.
            for name in (INDEX, _CONFIG):
                (self.output / name).unlink(missing_ok=True)
        names = {shard.path.name for shard, _ in planned.shards}
        for path in self.output.glob("model-*-of-*.safetensors"):
            if not same or path.name not in names:
                path.unlink()
        self._kept, self.decoded = planned.kept, planned.decoded
        self.files = [
            ShardPlan(shard, units, self._is_done(shard)) for shard, units in planned.shards
        ]
        free = shutil.disk_usage(self.output).free
        if self.expected > free:
            raise CheckpointError(
                f"{self.output} has {gigabytes(free)} free, and the conversion needs "
                f"{gigabytes(self.expected)}"
            )
        write_state(self.output, state)

    def _is_done(self, shard: Shard) -> bool:
        if not shard.path.exists():
            return False
        whole = shard.is_whole()
        if not whole:
            logger.warning("%s is damaged, and made again", shard.path)
        self._on_look(shard.path)
        return whole

    # --- writing --------------------------------------------------------------------------------

    def _write(self, one: ShardPlan, pool: ThreadPoolExecutor) -> Iterator[tuple[Shard, int]]:
        writer = ShardWriter(one.shard)

        def make(unit: Unit) -> int:
            for name, data in unit.pieces():
                writer.append(name, data)
            return unit.nbytes

        tasks: list[Future[int]] = []
        try:
            for unit in one.units:
                tasks.append(pool.submit(make, unit))  # noqa: PERF401 - where one fails, others are
            for done, task in enumerate(as_completed(tasks), 1):
                if done % self.threads == 0:
                    # Files that were read count as memory of this process.
                    self._source.checkpoint.close()
                    give_memory_back()
                yield one.shard, task.result()
            self._source.check()
            writer.commit()
        except BaseException as error:
            for task in tasks:
                task.cancel()
            # Those that run already still write to the file.
            for task in tasks:
                if not task.cancelled():
                    task.exception()
            writer.discard()
            if isinstance(error, CheckpointError) and not isinstance(error, SourceChange):
                # A file that is being written may look damaged.
                self._source.check()
            raise

    def _finish(self) -> None:
        """Write all that makes a model of the weights."""
        for relative in self._others:
            path = self.output / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, (self.source / relative).read_bytes())
        config = converted_config(read_json(self.source / _CONFIG), self.target, self._kept)
        self._source.check()
        specs = {spec.name: one.shard for one in self.files for spec in one.shard.specs}
        index = {
            "metadata": {
                "total_size": sum(spec.nbytes for one in self.files for spec in one.shard.specs)
            },
            "weight_map": {name: specs[name].path.name for name in sorted(specs)},
        }
        for name, document in ((_CONFIG, config), (INDEX, index)):
            text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
            write_file(self.output / name, text.encode())

    @contextmanager
    def _writing(self, shard: Shard | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(self._failure(shard, error)) from error

    def _failure(self, shard: Shard | None, error: OSError) -> str:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return f"{self.output} cannot be written: {error}"
        what = f"{shard.path.name} needs {gigabytes(shard.nbytes)}. " if shard else ""
        return (
            f"{self.output} is full: {what}Finished files are kept; make room and go on by --resume"
        )


def convert_checkpoint(
    source: str | Path,
    output: str | Path,
    *,
    to: str,
    group_size: int | None = None,
    resume: bool = False,
    threads: int | None = None,
    shard_nbytes: int = _SHARD_NBYTES,
) -> None:
    """Convert a checkpoint; parameters and errors as of `CheckpointConversion`."""
    with CheckpointConversion(
        source,
        output,
        to=to,
        group_size=group_size,
        resume=resume,
        threads=threads,
        shard_nbytes=shard_nbytes,
    ) as conversion:
        for _ in conversion.run():
            pass
