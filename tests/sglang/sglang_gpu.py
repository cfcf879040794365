"""The experts on the "GPU": weights as SGLang's own methods hold them, and products in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from sglang_checkpoints import INNER, SHAPES, TOP, H
from torch.nn import Parameter

from ktk.config import MoEConfig
from ktk.testing import reference
from ktk.testing.formats import Source

E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class TopK(NamedTuple):
    """What a router chose."""

    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: torch.Tensor | None = None


class Dispatch(NamedTuple):
    """Tokens on their way to experts."""

    hidden_states: torch.Tensor
    topk_output: TopK


class Combine(NamedTuple):
    """And back."""

    hidden_states: torch.Tensor


def config_of(runner: Any, experts: int) -> MoEConfig:
    """Return the layer that SGLang's configuration of a runner means."""
    alpha, limit = runner.gemm1_alpha, runner.gemm1_clamp_limit or runner.swiglu_limit
    more: dict[str, Any] = {"activation_limit": limit}
    if alpha:
        more |= {"activation": "swigluoai", "activation_alpha": alpha, "clamp_gate_below": True}
    return MoEConfig(
        num_experts=experts,
        num_experts_per_tok=min(TOP, experts),
        hidden_size=H,
        intermediate_size=INNER,
        **more,
    )


class Method:
    """Weights in bf16; the base of the others.

    `names` are the parameters of the layer: of gate above up, and of down.
    """

    names: tuple[tuple[str, ...], tuple[str, ...]] = (("w13_weight",), ("w2_weight",))

    def __init__(self, *_: Any, **__: Any) -> None:
        self.runner_config: Any = None
        self.given = torch.empty(0)
        self.had: dict[str, torch.Tensor] = {}

    # --- what a matrix [n, k] is stored as, in the order of `names` -----------------------------

    def shapes(self, n: int, k: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        return (((n, k), torch.bfloat16),)

    def stored(self, source: Source) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a matrix of the checkpoint."""
        return (torch.from_numpy(source.values).bfloat16(),)

    def values(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return what tensors mean, in float64."""
        return tensors[0].double()

    # --- SGLang's interface ---------------------------------------------------------------------

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        inner = intermediate_size_per_partition
        sizes = (2 * inner, hidden_size), (hidden_size, inner)
        for names, (n, k) in zip(self.names, sizes, strict=True):
            for name, (shape, dtype) in zip(names, self.shapes(n, k), strict=True):
                empty = torch.empty((num_experts, *shape), dtype=dtype)
                layer.register_parameter(name, Parameter(empty, requires_grad=False))

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def create_moe_runner(self, layer: torch.nn.Module, config: Any) -> None:
        self.runner_config = config

    def apply(self, layer: torch.nn.Module, dispatch: Dispatch) -> Combine:
        x, chosen = dispatch
        self.had = {name: getattr(layer, name).clone() for name in sum(self.names, ())}
        config = config_of(self.runner_config, len(getattr(layer, self.names[0][0])))
        result = reference.layer(
            x,
            chosen.topk_ids.numpy(),
            chosen.topk_weights,
            lambda slot: self.expert(layer, slot),
            config,
        )
        self.given = torch.from_numpy(result).to(x.dtype)
        return Combine(self.given)

    # --- for tests ------------------------------------------------------------------------------

    def meant(self, parts: dict[str, Source]) -> reference.Expert:
        """Return what an expert of the checkpoint means on this GPU, in float64."""
        exact = type(self) is not Method
        values: dict[str, Any] = {
            part: one.values if exact else self.values(*self.stored(one)).numpy()
            for part, one in parts.items()
        }
        return reference.Expert(**values)

    def expert(self, layer: torch.nn.Module, slot: int) -> reference.Expert:
        w13, w2 = (
            self.values(*(getattr(layer, name)[slot] for name in names)).numpy()
            for names in self.names
        )
        gate, up = np.split(w13, 2)
        return reference.Expert(gate=gate, up=up, down=w2)

    def tensors_of(self, parts: dict[str, Source]) -> dict[str, torch.Tensor]:
        """Return the parameters of one expert of the checkpoint."""
        gate, up, down = (self.stored(parts[part]) for part in SHAPES)
        w13 = [torch.cat(both, self.joined) for both in zip(gate, up, strict=True)]
        return dict(zip(sum(self.names, ()), (*w13, *down), strict=True))

    joined = 0  # the dimension in which gate stands above up

    def load(self, layer: torch.nn.Module, slot: int, parts: dict[str, Source]) -> None:
        """Fill a slot of the layer, as the engine's own loader does."""
        for name, tensor in self.tensors_of(parts).items():
            getattr(layer, name).data[slot].copy_(tensor)


def _as_e4m3(source: Source) -> torch.Tensor:
    return torch.from_numpy(source.data).view(torch.float8_e4m3fn)


_INVERSE = (("w13_weight", "w13_weight_scale_inv"), ("w2_weight", "w2_weight_scale_inv"))


class Fp8MoEMethod(Method):
    """E4M3 with an f32 for 128 x 128."""

    names = _INVERSE

    def shapes(self, n: int, k: int) -> Any:
        return ((n, k), torch.float8_e4m3fn), ((n // 128, k // 128), torch.float32)

    def stored(self, source: Source) -> tuple[torch.Tensor, ...]:
        return _as_e4m3(source), torch.from_numpy(source.scale)

    def values(self, *tensors: torch.Tensor) -> torch.Tensor:
        codes, scale = tensors
        blocks = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes.double() * blocks


class PerChannel(Fp8MoEMethod):
    """E4M3 with an f32 for a row."""

    names = (("w13_weight", "w13_weight_scale"), ("w2_weight", "w2_weight_scale"))

    def shapes(self, n: int, k: int) -> Any:
        return ((n, k), torch.float8_e4m3fn), ((n, 1), torch.float32)

    def values(self, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0].double() * tensors[1].double()


class Mxfp8(Fp8MoEMethod):
    """E4M3 with a power of two for 32 columns."""

    def shapes(self, n: int, k: int) -> Any:
        return ((n, k), torch.float8_e4m3fn), ((n, k // 32), torch.uint8)

    def create_weights(self, layer: torch.nn.Module, *arguments: Any, **named: Any) -> None:
        super().create_weights(layer, *arguments, **named)
        for name in ("w13_weight_scale_inv", "w2_weight_scale_inv"):
            getattr(layer, name).format_ue8m0 = True

    def values(self, *tensors: torch.Tensor) -> torch.Tensor:
        codes, scale = tensors
        return codes.double() * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)


class DeepSeekMxfp4MoEMethod(Method):
    """E2M1, two to a byte, with a power of two for 32 columns, which the GPU has as f32.

    The engine knows it by the name of the class, and wraps its FP8 method in one.
    """

    names = _INVERSE

    def shapes(self, n: int, k: int) -> Any:
        return ((n, k // 2), torch.int8), ((n, k // 32), torch.float32)

    def stored(self, source: Source) -> tuple[torch.Tensor, ...]:
        scale = torch.exp2(torch.from_numpy(source.scale).double() - 127)
        return torch.from_numpy(source.data).view(torch.int8), scale.float()

    def values(self, *tensors: torch.Tensor) -> torch.Tensor:
        codes, scale = tensors
        pairs = codes.view(torch.uint8).long()
        numbers = E2M1[torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)].double()
        return numbers * scale.double().repeat_interleave(32, 1)


class Marlin(Method):
    """Four bits in groups of 32, transposed as SGLang's compressed-tensors method has them."""

    names = (
        ("w13_weight_packed", "w13_weight_scale"),
        ("w2_weight_packed", "w2_weight_scale"),
    )
    num_bits, packed_factor, group_size, actorder = 4, 8, 32, None
    joined = 1

    def shapes(self, n: int, k: int) -> Any:
        return ((k // 8, n), torch.int32), ((k // 32, n), torch.bfloat16)

    def stored(self, source: Source) -> tuple[torch.Tensor, ...]:
        codes = torch.from_numpy(source.data).view(torch.int32)
        return codes.T.contiguous(), source.scale.T.contiguous()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # Marlin's tiles have 16 rows; what its kernel moves around in them stays here where it is.
        for packed, scales in self.names:
            codes, n = getattr(layer, packed), getattr(layer, scales).shape[2]
            codes.data = codes.data.view(len(codes), -1, 2 * n)

    def values(self, *tensors: torch.Tensor) -> torch.Tensor:
        codes, scale = tensors
        scale = scale.T.double().repeat_interleave(32, 1)
        bytes_ = codes.reshape(-1, len(scale)).T.contiguous().view(torch.uint8)
        numbers = torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(-2).double() - 8
        return numbers * scale


#: What the GPU holds of each kind of checkpoint; bf16 of the others.
METHODS: dict[str, type[Method]] = {
    "fp8 by blocks": Fp8MoEMethod,
    "fp8 by rows": PerChannel,
    "mxfp8": Mxfp8,
    "mxfp4": DeepSeekMxfp4MoEMethod,
    "int4": Marlin,
}
