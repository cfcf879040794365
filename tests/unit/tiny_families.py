"""Tiny models of the families that transformers can build, a row for each.

`test_transformers_oracle` reads the files that they write, and `test_more_families` loads them
through transformers; which families of the installed transformers are missing here, and in
`test_loaded_families`, says `test_coverage`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
mark = importlib.import_module("ktk.transformers.unmarked").mark

# What models are made with, where their configurations know the names. Layer 0 is dense in those
# that have dense layers; heads and ranks are as small as they go.
COMMON: dict[str, Any] = {
    "vocab_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "zero_expert_num": 3,
    "num_experts_per_tok": 3,
    "num_experts_per_token": 3,
    "moe_k": 3,
    "moe_topk": 3,
    "top_k_experts": 3,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_dense_layers": 1,
    "vocab_size_per_layer_input": 32,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "num_attention_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Model:
    """A row of the table: which class, what is expected of the file it writes, what it needs.

    `text` names the class of the language model's configuration where that of the model does not;
    `extra` is what it needs beside COMMON, `vision` what that of images needs beside VISION.
    """

    made_by: str
    family: str
    layers: tuple[int, ...] = (0, 1, 2)
    text: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)

    def make(self, hidden: int, inner: int) -> Any:
        """Make one, of several modalities where the class is."""
        of_class = getattr(transformers, self.made_by)
        mark()
        config = of_class.config_class
        if "text_config" not in config.sub_configs:
            return of_class(config(**self.options(config, hidden, inner)))
        parts = config.sub_configs
        text = getattr(transformers, self.text) if self.text else parts["text_config"]
        return of_class(
            config(
                text_config=text(**self.options(text, hidden, inner)),
                vision_config=self.seen(parts["vision_config"], hidden),
            )
        )

    def seen(self, config: Any, hidden: int) -> dict[str, Any]:
        """Return what a configuration of images is made of; any class can be named in `vision`."""
        options = VISION | {"out_hidden_size": hidden}
        return (options if "model_type" in self.vision else known(config, options)) | self.vision

    def options(self, config: Any, hidden: int, inner: int) -> dict[str, Any]:
        """Return what a configuration knows; experts are `inner` wide, dense layers twice that."""
        own = "moe_intermediate_size" in annotated(config)
        sizes = {"hidden_size": hidden, "moe_intermediate_size": inner}
        sizes["intermediate_size"] = 2 * inner if own else inner
        sizes |= {"expert_ffn_hidden_size": inner, "ffn_hidden_size": 2 * inner}
        return known(config, COMMON | sizes) | self.extra


def annotated(config: Any) -> set[str]:
    return {name for base in config.__mro__ for name in vars(base).get("__annotations__", {})}


def known(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in annotated(config)}


def width_of(experts: Any) -> int:
    """Return how wide what goes into experts is: not as wide as the model, in some."""
    shape: tuple[int, ...] = experts.down_proj.shape
    return shape[2 if experts.is_transposed else 1]


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
NEMOTRON = {"layers_block_type": ["full_attention", "moe", "moe"]}
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
OCR = {
    "sam_config": {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "mlp_dim": 32,
        "downsample_channels": [16, 32],
        "global_attn_indexes": [0],
    },
    "encoder_config": known(transformers.DeepseekOcr2VisionEncoderConfig, COMMON | VISION),
}
# At all sizes, in every variant of two backends.
MODELS = {
    "qwen3-moe": Model("Qwen3MoeForCausalLM", "per-expert"),
    "mixtral": Model("MixtralForCausalLM", "mixtral"),
    "gpt-oss": Model("GptOssForCausalLM", "gpt-oss", extra=ROPE),
}
# At one size, with the backend that their format implies.
FAMILIES = {
    "a.x-k1": Model("AXK1ForCausalLM", "per-expert", (1, 2)),
    "a.x-k2": Model("AXK2ForCausalLM", "per-expert", (1, 2)),
    "afmoe": Model("AfmoeForCausalLM", "per-expert", (1, 2)),
    "aria": Model("AriaTextForCausalLM", "aria"),
    "bailing": Model("BailingHybridForCausalLM", "per-expert", (1, 2)),
    "cohere2-moe": Model("Cohere2MoeForCausalLM", "per-expert"),
    "deepseek-v2": Model("DeepseekV2ForCausalLM", "per-expert", (1, 2)),
    "deepseek-v3": Model("DeepseekV3ForCausalLM", "per-expert", (1, 2)),
    "deepseek-v3.2": Model("DeepseekV32ForCausalLM", "per-expert", (1, 2)),
    "deepseek-v4": Model("DeepseekV4ForCausalLM", "mixtral"),
    "deepseek-ocr2": Model(
        "DeepseekOcr2ForConditionalGeneration", "per-expert", (1, 2), extra=SPARSE, vision=OCR
    ),
    "diffusion-gemma": Model(
        "DiffusionGemmaForBlockDiffusion", "fused", vision={"model_type": "gemma4_vision"}
    ),
    "dots1": Model("Dots1ForCausalLM", "per-expert", (1, 2)),
    "dots3-note": Model("Dots3NoteForCausalLM", "per-expert", (1, 2)),
    "ernie-4.5": Model("Ernie4_5_MoeForCausalLM", "per-expert", (1, 2)),
    "exaone-moe": Model("ExaoneMoeForCausalLM", "per-expert", (1, 2)),
    "flint": Model("FlintForCausalLM", "per-expert", (1, 2), extra={"mlp_only_layers": [0]}),
    "flex-olmo": Model("FlexOlmoForCausalLM", "per-expert"),
    "gemma4": Model("Gemma4ForCausalLM", "fused", extra={"enable_moe_block": True}),
    "glm-4.5": Model("Glm4MoeForCausalLM", "per-expert", (1, 2)),
    "glm-4.7-flash": Model("Glm4MoeLiteForCausalLM", "per-expert", (1, 2)),
    "glm-4.5v": Model("Glm4vMoeForConditionalGeneration", "per-expert", (1, 2)),
    "glm-5": Model("GlmMoeDsaForCausalLM", "per-expert", (1, 2)),
    "glm-5.3-flash": Model(
        "Glm5NextForConditionalGeneration",
        "per-expert",
        (1, 2),
        extra=SPARSE | {"linear_head_dim": 8, "linear_num_heads": 2, "qk_rope_head_dim": 0},
    ),
    "granite": Model("GraniteMoeForCausalLM", "granite"),
    "granite-hybrid": Model("GraniteMoeHybridForCausalLM", "granite", extra={"mamba_n_heads": 4}),
    "granite-shared": Model("GraniteMoeSharedForCausalLM", "granite"),
    "granite-swa": Model("GraniteMoeSWAForCausalLM", "fused"),
    "hunyuan": Model("HunYuanMoEV1ForCausalLM", "per-expert"),
    "hy-v3": Model("HYV3ForCausalLM", "per-expert", (1, 2)),
    "hy-v4": Model("HYV4ForCausalLM", "fused", (1, 2)),
    "inkling": Model("InklingForCausalLM", "fused"),
    "jamba": Model("JambaForCausalLM", "per-expert", (1,)),
    "kimi-k2.5": Model(
        "Kimi_K25ForConditionalGeneration", "per-expert", (1, 2), text="DeepseekV3Config"
    ),
    "kimi-linear": Model("KimiLinearForCausalLM", "mixtral", (1, 2)),
    "kolibri1": Model("Kolibri1ForCausalLM", "per-expert"),
    "laguna": Model("LagunaForCausalLM", "per-expert", (1, 2)),
    "lfm2": Model("Lfm2MoeForCausalLM", "mixtral", (1, 2), extra={"layer_types": ["conv"] * 3}),
    "longcat-flash": Model(
        "LongcatFlashForCausalLM", "per-expert", extra={"num_layers": 3, "head_dim": 4}
    ),
    "mellum": Model("MellumForCausalLM", "per-expert"),
    "mimo-v2": Model("MiMoV2FlashForCausalLM", "per-expert", (1, 2)),
    "minimax": Model("MiniMaxForCausalLM", "mixtral"),
    "minimax-m2": Model("MiniMaxM2ForCausalLM", "mixtral"),
    "minimax-m3": Model("MiniMaxM3VLForCausalLM", "fused"),
    "minimax-m3-vl": Model("MiniMaxM3SparseForConditionalGeneration", "mixtral"),
    "mistral4": Model("Mistral4ForCausalLM", "fused", (1, 2)),
    "mistral-large-4": Model(
        "MistralLarge4ForConditionalGeneration", "mixtral", (1, 2), vision={"model_type": "pixtral"}
    ),
    "nemotron-3": Model(
        "NemotronHForCausalLM", "per-expert", (1, 2), extra=NEMOTRON | {"moe_latent_size": 48}
    ),
    "nemotron-h": Model("NemotronHForCausalLM", "per-expert", (1, 2), extra=NEMOTRON),
    "olmoe": Model("OlmoeForCausalLM", "per-expert"),
    "openai-privacy-filter": Model(
        "OpenAIPrivacyFilterForTokenClassification", "fused-transposed", extra=ROPE
    ),
    "phimoe": Model("PhimoeForCausalLM", "mixtral"),
    "qwen2-moe": Model("Qwen2MoeForCausalLM", "per-expert"),
    "qwen3-next": Model("Qwen3NextForCausalLM", "per-expert"),
    "qwen3-vl-moe": Model("Qwen3VLMoeForConditionalGeneration", "fused"),
    "qwen4-exp": Model("Qwen4ExpForCausalLM", "per-expert"),
    "solar-open": Model("SolarOpenForCausalLM", "per-expert"),
    "unlimited-ocr": Model("UnlimitedOcrForConditionalGeneration", "per-expert", (1, 2)),
    "qwen3.5-moe": Model("Qwen3_5MoeForCausalLM", "per-expert"),
    "qwen3.5-moe-vl": Model("Qwen3_5MoeForConditionalGeneration", "per-expert"),
    "zaya": Model("ZayaForCausalLM", "fused", extra={"num_experts_per_tok": 1}),
}
