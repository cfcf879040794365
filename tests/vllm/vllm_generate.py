"""Run by vLLM's Python: generates from a model, and prints what came as JSON.

generate.py MODEL '{"prompts": [[1, 2]], "tokens": 16, "options": {...}}'
"""

from __future__ import annotations

import json
import sys
from typing import Any


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
    made = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in asked["prompts"]], sampling)
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
