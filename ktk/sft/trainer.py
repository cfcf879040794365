"""Checkpoints of transformers' Trainer with adapters of experts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ktk.lora import FACTORS
from ktk.sft.files import load_adapter, save_adapter
from ktk.sft.folders import KT, PEFT
from ktk.sft.sharded import is_sharded, leave_parts
from ktk.transformers.adapter import parameter_of

# A folder of each checkpoint; not in PEFT's layout, which Trainer would take for PEFT's own, and
# which has one rank.
FOLDER, LAYOUT = "experts", "parameters"


class SaveAdapters(TrainerCallback):
    """Save adapters of experts with each checkpoint, and read them where Trainer reads one.

    ``Trainer(model, ..., callbacks=[ktk.sft.SaveAdapters()])``. A model that PEFT wraps saves
    adapters of PEFT's only; with this, ``checkpoint-500/experts`` has those of experts, which
    `load_adapter` reads. ``train(resume_from_checkpoint=True)`` reads them, too, and so does the
    end of a training with ``load_best_model_at_end=True``.

    Parameters
    ----------
    resume_from : path, optional
        The checkpoint that ``train(resume_from_checkpoint=...)`` is given, where that is not one in
        the trainer's `output_dir`: Trainer does not tell callbacks.
    """

    def __init__(self, resume_from: str | os.PathLike[str] | None = None) -> None:
        self.resume_from = None if resume_from is None else Path(resume_from)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the adapters beside what Trainer has saved."""
        model = kwargs["model"]
        leave_parts(model)
        # What is divided among ranks is gathered by all of them.
        if state.is_world_process_zero or is_sharded(list(model.modules())):
            folder = _checkpoint(args, state) / FOLDER
            save_adapter(model, folder, LAYOUT)
            # Of an earlier training in the same place, by a ktk that had another layout.
            for name in (KT, PEFT):
                (folder / name).unlink(missing_ok=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the adapters of the checkpoint that Trainer has read.

        Raises
        ------
        ValueError
            That was another checkpoint than is found here, as what was logged until then shows; or
            it has other factors than the training has begun with.
        """
        if not state.global_step:
            return
        checkpoint = self.resume_from or _checkpoint(args, state)
        file = checkpoint / TRAINER_STATE_NAME
        if not file.exists() or not _same(TrainerState.load_from_json(str(file)), state):
            raise ValueError(
                f"the training goes on from another checkpoint than {checkpoint}: name the one "
                "that train() is given to SaveAdapters, too, as resume_from"
            )
        model = kwargs["model"]
        before = _factors(model)
        load_adapter(model, checkpoint / FOLDER)
        # The optimizer, which is there by now, trains those that it knows.
        after = _factors(model)
        others = [n for n in before | after if before.get(n) is not after.get(n)]
        if others:
            raise ValueError(
                f"{checkpoint / FOLDER} has another {others[0]} than the training has begun with: "
                "give add_lora the targets, rank and dtype of then, or call "
                "load_adapter(model, folder) before Trainer is made"
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the adapters of the best checkpoint, if Trainer has read it."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            load_adapter(kwargs["model"], Path(state.best_model_checkpoint) / FOLDER)


def _factors(model: Any) -> dict[str, Any]:
    """Return the parameters of adapters of experts by name."""
    return {
        name: one
        for name, one in model.named_parameters()
        if name.rpartition(".")[2] in map(parameter_of, FACTORS)
    }


def _checkpoint(args: Any, state: Any) -> Path:
    folder, name = Path(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
    if getattr(state, "is_hyper_param_search", False):
        # Each trial has a folder of its own, whose name Trainer does not tell, and has just saved.
        trials = folder.glob(f"*/{name}")
        return max(trials, key=lambda one: one.stat().st_mtime_ns, default=folder / name)
    return folder / name


def _same(read: TrainerState, state: TrainerState) -> bool:
    """Tell whether a state is the one that was read: what was logged differs between trainings."""
    return (read.global_step, read.log_history) == (state.global_step, state.log_history)
