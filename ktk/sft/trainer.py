"""Checkpoints of transformers' Trainer with adapters of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ktk.sft.files import load_adapter, save_adapter
from ktk.sft.sharded import is_sharded, leave_parts

# A folder of each checkpoint; not in PEFT's layout, which Trainer would take for PEFT's own.
FOLDER, LAYOUT = "experts", "kt"


class SaveAdapters(TrainerCallback):
    """Save adapters of experts with each checkpoint, and read them where a training goes on.

    ``Trainer(model, ..., callbacks=[ktk.sft.SaveAdapters()])``. A model that PEFT wraps saves
    adapters of PEFT's only; with this, ``checkpoint-500/experts`` has those of experts, which
    `load_adapter` reads. ``train(resume_from_checkpoint=True)`` reads them, too.
    """

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the adapters beside what Trainer has saved."""
        model = kwargs["model"]
        leave_parts(model)
        # What is divided among ranks is gathered by all of them.
        if state.is_world_process_zero or is_sharded(list(model.modules())):
            save_adapter(model, _folder(args, state), LAYOUT)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the adapters of the checkpoint that Trainer has read."""
        if state.global_step:
            load_adapter(kwargs["model"], _folder(args, state))


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / FOLDER
