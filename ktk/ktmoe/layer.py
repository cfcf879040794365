"""A layer as the constructor of `KTMoEWrapper` makes it, and what it is filled with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ktk import _core
from ktk.config import MoEConfig
from ktk.ktmoe.arguments import (
    activation,
    at_least,
    integer,
    refuse_sft,
    warn_of_path,
    warn_of_variables,
)
from ktk.ktmoe.deferral import check_policy
from ktk.ktmoe.loading import Loaded, as_list, check_method, load_from_path, load_from_tensors
from ktk.ktmoe.masks import check_mask, initial_mask
from ktk.ktmoe.model import ModelState
from ktk.ktmoe.pools import shared_pool
from ktk.ktmoe.writers import Formats
from ktk.moe import MoE
from ktk.names import KT_METHOD
from ktk.registry import load_backend


class CPUInfer:
    """The workers of a layer, under the name that kt-kernel has for them."""

    def __init__(self, pool: _core.WorkerPool, state: ModelState) -> None:
        self.pool = pool
        self._state = state

    def sync(self, allow_n_pending: int = 0) -> None:
        """Wait for what is queued on the pool, and raise what went wrong in it.

        `allow_n_pending` is accepted; all of it is waited for.
        """
        _core.drain(self.pool)
        self._state.check()

    def __getattr__(self, name: str) -> Any:
        # An AttributeError, so that who asks whether a function is there is told the truth.
        raise AttributeError(
            f"CPUInfer has no {name!r} here: the tasks of kt_kernel_ext are addresses; use "
            "submit_forward and sync_forward of the layer"
        )


class Layer:
    """Sizes, workers, mask and weights of a layer; :class:`KTMoEWrapper` says what they mean."""

    def __init__(
        self,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask: torch.Tensor | int | None = None,
        cpuinfer_threads: int | None = None,
        threadpool_count: int | None = None,
        weight_path: str | Path | None = None,
        chunked_prefill_size: int | None = None,
        cpu_save: bool = False,
        max_deferred_experts_per_token: int | None = None,
        method: str = KT_METHOD,
        numa_nodes: Sequence[int] | None = None,
        mode: str = "inference",
        num_gpu_experts: int | None = None,
        lora_rank: int = 16,
        lora_alpha: float = 32.0,
        lora_dropout: float = 0.0,
        max_cache_depth: int = 1,
        group_size: int = 128,
        zero_point: bool = True,
        full_weight_grad: bool = False,
        swiglu_limit: float = 0.0,
        swiglu_alpha: float = 0.0,
        *,
        model: ModelState | None = None,
        deferral_policy: str = "per-token",
        keep_gpu_experts: bool = True,
        shards: int | None = None,
        zero_expert_num: int = 0,
    ) -> None:
        refuse_sft(
            mode,
            method,
            lora_rank=lora_rank,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            max_cache_depth=max_cache_depth,
            group_size=group_size,
            zero_point=zero_point,
            full_weight_grad=full_weight_grad,
        )
        warn_of_variables()
        warn_of_path(weight_path)
        self.config = MoEConfig(
            num_experts=integer(num_experts),
            num_experts_per_tok=integer(num_experts_per_tok),
            hidden_size=integer(hidden_size),
            intermediate_size=integer(moe_intermediate_size),
            zero_expert_num=integer(zero_expert_num),
        )
        self.layer_idx = at_least("layer_idx", layer_idx, 0)
        self.num_experts = self.config.num_experts
        self.num_experts_per_tok = self.config.num_experts_per_tok
        self.hidden_size = self.config.hidden_size
        self.moe_intermediate_size = self.config.intermediate_size
        self.chunked_prefill_size = chunked_prefill_size
        self.method = method
        self.weight_path = weight_path
        self.deferral_policy = check_policy(deferral_policy)
        self.max_deferred_experts_per_token = at_least(
            "max_deferred_experts_per_token", max_deferred_experts_per_token or 0, 0
        )
        self._mask = initial_mask(self.num_experts, gpu_experts_mask, num_gpu_experts)
        self._keep_gpu_experts = keep_gpu_experts
        self._shards = shards
        self._activation = activation(swiglu_limit, swiglu_alpha)
        self.backend = load_backend(method)
        pool = shared_pool(cpuinfer_threads, threadpool_count, numa_nodes)
        key = (str(weight_path), self.hidden_size, self.num_experts_per_tok, id(pool))
        self.model = model or ModelState.of_layer(key, self.layer_idx)
        self.model.add_layer(self.layer_idx, self)
        self.cpu_infer = CPUInfer(pool, self.model)
        self.moe: MoE | None = None
        self._given: Formats | None = None  # what the weights were before they were loaded
        self._from_tensors = False  # and not from weight_path
        self._order: list[int] | None = None  # which expert of either each slot has

    # What Python says of wrong arguments names the class that users know.
    __init__.__qualname__ = "KTMoEWrapper.__init__"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__} of layer {self.layer_idx} cannot be pickled or copied: its "
            "weights are packed for the workers of this process. Make one where it is needed, and "
            "load it there"
        )

    @property
    def gpu_experts_mask(self) -> torch.Tensor:
        """The live mask, bool [num_experts] in CPU memory."""
        return self._mask

    @gpu_experts_mask.setter
    def gpu_experts_mask(self, mask: torch.Tensor) -> None:
        # Calls that were captured read the memory of the first one.
        self._mask.copy_(check_mask(self.config.num_experts, mask))

    @property
    def num_gpu_experts(self) -> int:
        """How many experts the mask gives to the GPU."""
        return int(self._mask.sum())

    @num_gpu_experts.setter
    def num_gpu_experts(self, number: int) -> None:
        if number != self.num_gpu_experts:
            raise AttributeError(
                f"num_gpu_experts is what gpu_experts_mask says, {self.num_gpu_experts}; change "
                "the mask to move experts"
            )

    # --- loading --------------------------------------------------------------------------------

    def load_weights(
        self,
        physical_to_logical_map_cpu: torch.Tensor | Sequence[int] | None = None,
        *,
        force: bool = False,
    ) -> None:
        """Load the layer from `weight_path`.

        Parameters
        ----------
        physical_to_logical_map_cpu : int tensor [num_experts], optional
            Slot p is filled with expert ``map[p]`` of the checkpoint; by default p.
        force : bool
            Load even what seems to be more than memory can hold.

        Raises
        ------
        CheckpointError
            When something is missing, damaged, or not of the sizes of this layer; a
            CheckpointTooLarge when memory cannot hold it.
        """
        order = as_list(physical_to_logical_map_cpu)
        self._use(self._load("load_weights", self._experts(), order, force=force), order)

    def release_gpu_experts(self) -> int:
        """Give the memory of experts back that the mask gives to the GPU, for good.

        From then on a mask must give them to the GPU: a call that wants one of them on the CPU
        raises a RuntimeError, until :meth:`load_cpu_experts` or ``moe.load_expert`` brings it back.
        The writers have no weights of theirs either, so that full GPU prefill and dynamic updates,
        which copy all experts to the GPU, need them.

        Returns
        -------
        int
            Packed bytes that were given back.
        """
        moe = self._loaded("release_gpu_experts")
        before = moe.nbytes
        for expert in torch.nonzero(self._mask).flatten().tolist():
            moe.unload_expert(expert)
        return before - moe.nbytes

    def load_cpu_experts(self, *, force: bool = False) -> int:
        """Load experts from `weight_path` that the mask gives to the CPU, and that have no memory.

        They were released, or never loaded because of ``keep_gpu_experts=False``. Calls meanwhile
        wait for an expert at most. Weights that were last given as tensors come back by tensors
        only: nobody knows whether `weight_path` has the same.

        Parameters
        ----------
        force : bool
            As of :meth:`load_weights`.

        Returns
        -------
        int
            How many were loaded.

        Raises
        ------
        CheckpointError
            As of :meth:`load_weights`.
        RuntimeError
            The layer has no weights, or lacks experts of weights that were given as tensors.
        """
        moe = self._loaded("load_cpu_experts")
        loaded = set(moe.loaded)
        experts = [expert for expert in self._cpu_experts() if expert not in loaded]
        if experts and self._from_tensors:
            raise RuntimeError(
                f"load_cpu_experts of layer {self.layer_idx}: expert {experts[0]} has no memory, "
                "and its weights were given as tensors, which weight_path may not have. Give the "
                "tensors again, by load_weights_from_tensors; load_weights loads what weight_path "
                "has"
            )
        if experts:
            self._load("load_cpu_experts", experts, self._order, force=force, into=moe)
        return len(experts)

    def load_weights_from_tensors(
        self,
        gate_proj: torch.Tensor,
        up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        physical_to_logical_map_cpu: torch.Tensor | Sequence[int] | None = None,
    ) -> None:
        """Pack the layer from floats, which may go afterwards.

        Parameters
        ----------
        gate_proj, up_proj : tensor [experts, moe_intermediate_size, hidden_size]
        down_proj : tensor [experts, hidden_size, moe_intermediate_size]
            bf16, f16 or f32, in CPU memory.
        physical_to_logical_map_cpu : int tensor [num_experts], optional
            Slot p is filled with expert ``map[p]`` of the tensors; by default p.
        """
        order = as_list(physical_to_logical_map_cpu)
        self._use(
            load_from_tensors(
                self.backend,
                replace(self.config, **self._activation),
                (gate_proj, up_proj, down_proj),
                self._experts(),
                order,
                pool=self.cpu_infer.pool,
                shards=self._shards,
            ),
            order,
            from_tensors=True,
        )

    @staticmethod
    def force_release_loader() -> None:
        """Do nothing: files are closed when :meth:`load_weights` returns."""

    def _experts(self) -> list[int]:
        """Return the slots to load."""
        if self._keep_gpu_experts:
            return list(range(self.config.num_experts))
        return self._cpu_experts()

    def _cpu_experts(self) -> list[int]:
        return torch.nonzero(~self._mask).flatten().tolist()

    def _load(
        self,
        caller: str,
        experts: Sequence[int],
        order: Sequence[int] | None,
        *,
        force: bool,
        into: MoE | None = None,
    ) -> Loaded:
        if not self.weight_path:
            raise ValueError(f"{caller} needs the weight_path that the layer was made without")
        return load_from_path(
            self.weight_path,
            self.layer_idx,
            self.method,
            self.config,
            experts,
            order,
            activation=self._activation,
            into=into,
            pool=self.cpu_infer.pool,
            shards=self._shards,
            force=force,
        )

    def _loaded(self, caller: str) -> MoE:
        if self.moe is None:
            raise RuntimeError(
                f"{caller} of layer {self.layer_idx}: it has no weights, call load_weights first"
            )
        return self.moe

    def _use(
        self, loaded: Loaded, order: list[int] | None = None, *, from_tensors: bool = False
    ) -> None:
        moe, given = loaded
        check_method(self.method, moe)
        self.moe, self._given = moe, given
        # Graphs have the weights from before: their replays write nothing, and a call says so.
        self.model.captured_calls.pop(self, None)
        self._order, self._from_tensors = order, from_tensors
        # What a checkpoint says.
        self.config = replace(self.config, zero_expert_num=moe.config.zero_expert_num)
        if not self._keep_gpu_experts:
            # What is not there must not be wanted: without this it would contribute nothing.
            for expert in set(range(self.config.num_experts)) - set(moe.loaded):
                moe.unload_expert(expert)
