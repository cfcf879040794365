"""Quantise a model for the GPU that works beside ktk, with the flags of kt-kernel's script.

llmcompressor does the work: GPTQ with calibration data, or rounding to nearest (RTN), to int4 or
int8 weights with 16-bit activations, as compressed-tensors, which vLLM and SGLang read. It brings
versions of transformers with it that requirements/constraints.txt does not have; an environment of
its own is best:

    pip install "ktk[gpu-weights]"
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any

DTYPES = ("bfloat16", "float16", "float32")
# What stays as it is: the head, and what routes tokens, where an error changes which experts run.
IGNORED = ("lm_head", r"re:.*\.gate$", r"re:.*\.router$", r"re:.*shared_expert_gate$")
MISSING = (
    'llmcompressor is not installed, and it does the work: pip install "ktk[gpu-weights]", best in '
    "an environment of its own"
)
_DATA = "HuggingFaceH4/ultrachat_200k"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model_id", required=True, help="folder, or name on the hub")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--quant_method", choices=("GPTQ", "RTN"), default="GPTQ")
    parser.add_argument("--quant_type", choices=("W4A16", "W8A16"), default="W8A16")
    parser.add_argument("--num_calibration_samples", type=int, default=512)
    parser.add_argument("--max_sequence_length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--dampening_frac", type=float, default=0.1, help="of GPTQ")
    parser.add_argument("--dataset", default=_DATA, help="with a column messages or text")
    parser.add_argument("--dataset_split", default="train_sft")
    parser.add_argument("--force_cpu", action="store_true", help="use no GPU")
    parser.add_argument(
        "--ignore_patterns", nargs="*", default=[], help=f"beside {', '.join(IGNORED)}"
    )
    parser.add_argument("--torch_dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--trust_remote_code", action="store_true")
    parser.add_argument("--random_seed", type=int, default=42)
    parser.add_argument("--max_gpu_memory", help="of each GPU, such as 20GiB")
    parser.add_argument("--max_cpu_memory", help="such as 200GiB")
    options = parser.parse_args(arguments)
    for name in ("max_gpu_memory", "max_cpu_memory"):
        value = getattr(options, name)
        if value is not None and not re.fullmatch(r"\d+(\.\d+)?([KMG]i?B)?", value):
            parser.error(f"--{name} must be a size such as 20GiB, got {value!r}")
    return options


def placement(options: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """Return where `from_pretrained` is to put the model."""
    if options.force_cpu or gpus == 0:
        return {"device_map": "cpu"}
    memory: dict[int | str, str] = {}
    if options.max_gpu_memory is not None:
        memory |= dict.fromkeys(range(gpus), options.max_gpu_memory)
    if options.max_cpu_memory is not None:
        memory["cpu"] = options.max_cpu_memory
    return {"device_map": "auto", **({"max_memory": memory} if memory else {})}


def recipe(options: argparse.Namespace) -> Any:
    """Return what llmcompressor is to do."""
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    chosen = {
        "targets": "Linear",
        "scheme": options.quant_type,
        "ignore": [*IGNORED, *options.ignore_patterns],
    }
    if options.quant_method == "RTN":
        return QuantizationModifier(**chosen)
    return GPTQModifier(**chosen, dampening_frac=options.dampening_frac)


def calibration(options: argparse.Namespace, tokenizer: Any) -> Any:
    """Return tokenised samples of the data set."""
    from datasets import load_dataset

    samples = load_dataset(options.dataset, split=options.dataset_split)
    count = min(options.num_calibration_samples, len(samples))
    samples = samples.shuffle(seed=options.random_seed).select(range(count))

    def tokens(sample: dict[str, Any]) -> Any:
        text = sample.get("text")
        if text is None:
            text = tokenizer.apply_chat_template(sample["messages"], tokenize=False)
        return tokenizer(
            text,
            padding=False,
            truncation=True,
            max_length=options.max_sequence_length,
            # Templates have them in the text.
            add_special_tokens="text" in sample,
        )

    return samples.map(tokens, remove_columns=samples.column_names)


def convert(options: argparse.Namespace) -> None:
    """Load the model, quantise it, and save it."""
    import torch
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

    set_seed(options.random_seed)
    trust = {"trust_remote_code": options.trust_remote_code}
    model = AutoModelForCausalLM.from_pretrained(
        options.model_id,
        dtype=getattr(torch, options.torch_dtype),
        **placement(options, torch.cuda.device_count()),
        **trust,
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model_id, **trust)
    data: dict[str, Any] = {}
    if options.quant_method == "GPTQ":
        data = {
            "dataset": calibration(options, tokenizer),
            "max_seq_length": options.max_sequence_length,
            "num_calibration_samples": options.num_calibration_samples,
        }
    oneshot(model=model, recipe=recipe(options), **data)
    model.save_pretrained(options.output_dir, save_compressed=True)
    tokenizer.save_pretrained(options.output_dir)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script."""
    options = parse(arguments)
    try:
        import llmcompressor  # noqa: F401
    except ImportError:
        sys.exit(f"convert_gpu_weights: {MISSING}")
    convert(options)


if __name__ == "__main__":
    main()
