"""Run by vLLM's Python: generates from a model, and prints what came as JSON.

generate.py MODEL '{"prompts": [[1, 2]], "tokens": 16, "options": {...}}'

With "again" the model is loaded a second time first, as where it learns: "load_weights" is what a
model does with tensors, "reload_weights" what vLLM does with files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def load(model: Any, folder: str) -> None:
    """Hand files over to a model of vLLM, a tensor at a time."""
    from safetensors import safe_open

    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                model.load_weights([(name, file.get_tensor(name))])


def main() -> None:
    from vllm import LLM, SamplingParams, TokensPrompt

    model, asked = sys.argv[1], json.loads(sys.argv[2])
    options: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": 192,
        "max_num_seqs": 8,
        "dtype": "bfloat16",
        **asked["options"],
    }
    llm = LLM(model=model, **options)
    sampling = SamplingParams(
        temperature=0, max_tokens=asked["tokens"], ignore_eos=True, logprobs=5
    )
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in asked["prompts"]]
    if again := asked.get("again"):
        llm.generate(prompts, sampling)
        if again == "load_weights":
            llm.apply_model(lambda one: load(one, model))
        else:
            llm.collective_rpc("update_config", args=({"load_config": {"load_format": "auto"}},))
            llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
    made = llm.generate(prompts, sampling)
    found = [
        {
            "tokens": list(one.outputs[0].token_ids),
            "logprobs": [
                {str(token): value.logprob for token, value in at.items()}
                for at in one.outputs[0].logprobs
            ],
        }
        for one in made
    ]
    print("RESULT", json.dumps(found))


if __name__ == "__main__":
    main()
