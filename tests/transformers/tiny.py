"""Tiny random models of many families, and what they compute in float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from ktk.transformers.layout import is_experts

H, INTER, EXPERTS, TOP_K, VOCABULARY = 128, 64, 8, 2, 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": H,
    "intermediate_size": 2 * INTER,
    "moe_intermediate_size": INTER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_topk": TOP_K,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": INTER,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """A class of transformers, and what it wants beside COMMON."""

    made_by: str
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        kind = getattr(transformers, self.made_by).config_class
        annotated = {
            name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})
        }
        return kind(**{k: v for k, v in COMMON.items() if k in annotated} | self.extra)

    def make(self) -> Any:
        """Make a model in float32 whose weights are bf16 numbers."""
        torch.manual_seed(0)
        model = getattr(transformers, self.made_by)(self.config()).eval()
        with torch.no_grad():
            for name, one in model.named_parameters():
                if one.ndim > 1:
                    # Experts outweigh the rest, so that their errors are not lost in it.
                    one.normal_(std=(1.0 if ".experts." in name else 0.5) / one.shape[-1] ** 0.5)
                one.copy_(one.bfloat16())
                if name.endswith("experts.gate_up_proj"):
                    one[EXPERTS:] = 0  # LongCat-Flash's rows of zero experts, which nobody reads
        return model

    def save(self, folder: Path) -> Path:
        """Write a model as it would be published, in bf16."""
        made = self.make()
        for one in made.parameters():  # not buffers, of which some have to be f32
            one.data = one.data.bfloat16()
        made.save_pretrained(folder)
        return folder


PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
FAMILIES = {
    "aria": Family("AriaTextForCausalLM", {"intermediate_size": INTER}),
    "deepseek-v3": Family("DeepseekV3ForCausalLM", {"num_key_value_heads": 4}),
    "deepseek-v4": Family("DeepseekV4ForCausalLM"),
    "glm-4-moe": Family("Glm4MoeForCausalLM"),
    "gpt-oss": Family("GptOssForCausalLM", {**PLAIN_ROPE, "intermediate_size": INTER}),
    "longcat-flash": Family(
        "LongcatFlashForCausalLM",
        {
            "num_layers": 2,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "ffn_hidden_size": 2 * INTER,
            "expert_ffn_hidden_size": INTER,
            "zero_expert_num": 4,
        },
    ),
    "minimax-m2": Family("MiniMaxM2ForCausalLM", {"intermediate_size": INTER}),
    "mixtral": Family("MixtralForCausalLM", {"intermediate_size": INTER}),
    "nemotron-h": Family("NemotronHForCausalLM", {"layers_block_type": ["full_attention", "moe"]}),
    "olmoe": Family("OlmoeForCausalLM", {"intermediate_size": INTER}),
    "qwen3-moe": Family("Qwen3MoeForCausalLM"),
    "qwen3-next": Family("Qwen3NextForCausalLM", {"num_hidden_layers": 4}),
}


def tokens(rows: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def float32(folder: Path) -> Any:
    """Return the model as transformers computes it in float32."""
    return load(folder, dtype=torch.float32, experts_implementation="eager")


def logits(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids, **options).logits
    return found.double()


@dataclass
class Calls:
    """The calls of all layers of experts, in order."""

    inputs: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


@contextmanager
def recorded(model: Any) -> Iterator[Calls]:
    """Keep what layers of experts are called with, and what they return."""
    calls = Calls()

    def after(module: Any, args: Any, out: torch.Tensor) -> None:
        calls.inputs.append(tuple(one.clone() for one in args))
        calls.outputs.append(out.clone())

    hooks = [one.register_forward_hook(after) for one in model.modules() if is_experts(one)]
    yield calls
    for hook in hooks:
        hook.remove()


@contextmanager
def routed_as(model: Any, calls: Calls) -> Iterator[None]:
    """Send each token to the experts that another run chose.

    Two logits of a router that are almost equal may be in either order after rounding; then all of
    an expert is the difference, which says nothing of how well either was computed.
    """
    left = iter(list(calls.inputs))

    def before(module: Any, args: Any) -> Any:
        _, ids, weights = next(left)
        return args[0], ids, weights.to(args[2].dtype)

    hooks = [one.register_forward_pre_hook(before) for one in model.modules() if is_experts(one)]
    yield
    for hook in hooks:
        hook.remove()


@dataclass(frozen=True)
class Reference:
    """A saved model, what it computes in float32, and how far bf16 is from that."""

    folder: Path
    ids: torch.Tensor
    calls: Calls
    logits: torch.Tensor
    eager: torch.Tensor

    @classmethod
    def of(cls, folder: Path, exact: Any = None) -> Reference:
        """Compute it; `exact` is the model, if transformers does not read the folder itself."""
        ids, exact = tokens(), exact or float32(folder)
        with recorded(exact) as calls:
            wanted = logits(exact, ids)
        half = exact_as_bf16(exact)
        with routed_as(half, calls):
            return cls(folder, ids, calls, wanted, logits(half, ids))

    def error(self, model: Any) -> torch.Tensor:
        """Return how far a model's logits are from float32's, with the same experts chosen."""
        with routed_as(model, self.calls):
            return logits(model, self.ids) - self.logits


def exact_as_bf16(model: Any) -> Any:
    """Return the model as it would be after loading it in bf16, for transformers' eager loop."""
    half = copy.deepcopy(model)
    for one in half.parameters():
        one.data = one.data.bfloat16()
    half.config.dtype = torch.bfloat16
    return half
