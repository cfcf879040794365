"""Fine-tuning of models whose experts lie packed; docs/training.md tells users.

::

    import ktk.sft, ktk.transformers
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="ktk")
    ktk.sft.add_lora(model, rank=8, alpha=16)       # PEFT may train attention
    Trainer(model, ...).train()
    ktk.sft.save_adapter(model, "adapter")

Weights of experts stay packed and frozen, for any backend. Factors are ordinary parameters of the
modules of experts. `experts` adds and removes them and switches them off, `merging` adds them to
weights, `files` reads and writes adapters, `folders` knows what stands in their folders, `names`
what they call their tensors, and `pairs` makes factors of several ranks and scales one adapter;
`peft_layers` lets PEFT switch them with its own; `trainer` is for checkpoints of a training;
`sharded` puts together what `fully_shard` divides, and `arguments` says what is no argument.
"""

from ktk.sft.experts import add_lora, merge, remove_lora, without_lora
from ktk.sft.files import load_adapter, save_adapter
from ktk.sft.trainer import SaveAdapters

__all__ = [
    "SaveAdapters",
    "add_lora",
    "load_adapter",
    "merge",
    "remove_lora",
    "save_adapter",
    "without_lora",
]
