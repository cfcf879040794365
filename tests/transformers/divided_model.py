"""Loads a model in each process that torchrun starts, or in one, and writes what it computes.

Arguments: a folder, a backend, a file for the results, to which the number of the rank is added.
"""

import os
import sys
from typing import Any

import torch
import transformers

import ktk.transformers
from ktk.transformers.packed import packed_modules


def main(path: str, backend: str, results: str) -> None:
    options = {}
    if size := int(os.environ.get("WORLD_SIZE", 0)):
        from transformers.distributed.configuration_utils import DistributedConfig

        options["distributed_config"] = DistributedConfig(tp_size=size, ep_size=size)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        experts_implementation="ktk",
        quantization_config=ktk.transformers.KtkConfig(backend),
        **options,
    )
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        logits = model(ids).logits
        made = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
    layers = [packed.moe for packed in packed_modules(model).values()]
    torch.save(
        {
            "logits": logits,
            "tokens": made,
            "experts": [moe.loaded for moe in layers],
            "workers": sorted({cpu for moe in layers for cpu in moe.pool.cpus}),
            # Of all threads, torch's and those of other libraries included.
            "cpus": sorted(
                {
                    cpu
                    for thread in os.listdir("/proc/self/task")
                    for cpu in os.sched_getaffinity(int(thread))
                }
            ),
        },
        f"{results}.{os.environ.get('RANK', 'one')}",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
