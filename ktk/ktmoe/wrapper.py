"""One layer of experts behind the interface of kt-kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ktk import _core
from ktk.config import MoEConfig
from ktk.ktmoe.arguments import activation, refuse_sft
from ktk.ktmoe.deferral import check_policy, select_deferred
from ktk.ktmoe.loading import as_list, load_from_path, load_from_tensors
from ktk.ktmoe.masks import check_mask, initial_mask
from ktk.ktmoe.model import ModelState, clear_all
from ktk.ktmoe.pools import shared_pool
from ktk.ktmoe.steps import (
    Inputs,
    Step,
    Submission,
    result_on_stream,
    submit_on_pool,
    submit_on_stream,
)
from ktk.ktmoe.streams import handle_of, on_gpu
from ktk.ktmoe.writers import submit_write
from ktk.moe import MoE
from ktk.registry import load_backend

_capture_sizes: list[int] = []


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


class KTMoEWrapper:
    """The experts of one layer on the CPU, called as kt-kernel's class of this name is.

    Parameters
    ----------
    layer_idx : int
        Number of the layer in the model and its checkpoint.
    num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size : int
        Sizes of the layer.
    gpu_experts_mask : bool tensor [num_experts], optional
        True: the expert is computed elsewhere and contributes nothing here. It is copied; change
        the attribute of this name in place, and later calls (and replays of graphs) obey. The GPU's
        experts stay loaded, because the mask may change.
    cpuinfer_threads, threadpool_count, numa_nodes
        Workers in all, the parts they are divided into, and the NUMA node of each part: see
        :func:`ktk.ktmoe.pools.shared_pool`. The workers are made here and stay on their CPUs.
    weight_path : path, optional
        What :meth:`load_weights` reads: a checkpoint, or a file or folder of GGUF.
    chunked_prefill_size : int, optional
        Accepted; a call takes any number of tokens.
    cpu_save : bool
        Accepted, and means nothing: weights that are computed with stay in memory.
    max_deferred_experts_per_token : int, optional
        That many experts of each token, those with the lowest weights, may finish while the next
        layer is on its way; their part is added to the next layer's result. The last layer must
        have 0 here, or :meth:`flush` be called after it.
    method : str
        Name of a backend or an alias: AMXINT4, AMXINT8, RAWINT4, FP8, FP8_PERCHANNEL, BF16, MXFP4,
        MXFP8, GPTQ_INT4, MOE_INT8, MOE_INT4, LLAMAFILE ...
    mode : str
        "inference".
    num_gpu_experts : int, optional
        Experts 0 .. n-1 are the GPU's: what came before the mask.
    swiglu_limit, swiglu_alpha : float
        See :func:`ktk.ktmoe.arguments.activation`.
    model : ModelState, optional
        What the layers of a model share; found by weights and sizes if it is not given.
    deferral_policy : str
        "per-token", or "batch-union" for kt-kernel's own choice; see :mod:`ktk.ktmoe.deferral`.
    keep_gpu_experts : bool
        False: experts that the mask gives to the GPU are not loaded, and take no memory. They can
        never come back.

    Attributes
    ----------
    moe : MoE or None
        The loaded layer.
    cpu_infer : CPUInfer
    model : ModelState

    Raises
    ------
    NotImplementedError
        For the fine-tuning mode.
    BackendNotFound, BackendUnsupported
        As :func:`ktk.load_backend`.
    """

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
        method: str = "AMXINT4",
        numa_nodes: Sequence[int] | None = None,
        mode: str = "inference",
        num_gpu_experts: int | None = None,
        swiglu_limit: float = 0.0,
        swiglu_alpha: float = 0.0,
        *,
        model: ModelState | None = None,
        deferral_policy: str = "per-token",
        keep_gpu_experts: bool = True,
        **sft: Any,
    ) -> None:
        refuse_sft(mode, method, sft)
        self.config = MoEConfig(
            num_experts=num_experts,
            num_experts_per_tok=num_experts_per_tok,
            hidden_size=hidden_size,
            intermediate_size=moe_intermediate_size,
        )
        self.layer_idx = layer_idx
        self.method = method
        self.weight_path = weight_path
        self.deferral_policy = check_policy(deferral_policy)
        self.max_deferred_experts_per_token = max_deferred_experts_per_token or 0
        if self.max_deferred_experts_per_token < 0:
            raise ValueError(
                "max_deferred_experts_per_token must not be negative, "
                f"got {max_deferred_experts_per_token}"
            )
        self._mask = initial_mask(num_experts, gpu_experts_mask, num_gpu_experts)
        self._keep_gpu_experts = keep_gpu_experts
        self._activation = activation(swiglu_limit, swiglu_alpha)
        self.backend = load_backend(method)
        pool = shared_pool(cpuinfer_threads, threadpool_count, numa_nodes)
        key = (str(weight_path), hidden_size, num_experts_per_tok, id(pool))
        self.model = model or ModelState.of_layer(key, layer_idx)
        self.model.add_layer(layer_idx, self)
        self.cpu_infer = CPUInfer(pool, self.model)
        self.moe: MoE | None = None
        self._left_out = torch.zeros(num_experts, dtype=torch.bool)
        self._step: Step | None = None
        self._write: _core.Job | None = None

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

    # --- loading --------------------------------------------------------------------------------

    def load_weights(
        self, physical_to_logical_map_cpu: torch.Tensor | Sequence[int] | None = None
    ) -> None:
        """Load the layer from `weight_path`.

        Parameters
        ----------
        physical_to_logical_map_cpu : int tensor [num_experts], optional
            Slot p is filled with expert ``map[p]`` of the checkpoint; by default p.

        Raises
        ------
        CheckpointError
            When something is missing, damaged, or not of the sizes of this layer.
        """
        if not self.weight_path:
            raise ValueError("load_weights needs the weight_path that the layer was made without")
        self._use(
            load_from_path(
                self.weight_path,
                self.layer_idx,
                self.backend,
                self.config,
                self._experts(),
                as_list(physical_to_logical_map_cpu),
                pool=self.cpu_infer.pool,
                **self._activation,
            )
        )

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
        self._use(
            load_from_tensors(
                self.backend,
                replace(self.config, **self._activation),
                (gate_proj, up_proj, down_proj),
                self._experts(),
                as_list(physical_to_logical_map_cpu),
                pool=self.cpu_infer.pool,
            )
        )

    def _experts(self) -> list[int]:
        """Return the slots to load."""
        if self._keep_gpu_experts:
            return list(range(self.config.num_experts))
        return torch.nonzero(~self._mask).flatten().tolist()

    def _use(self, moe: MoE) -> None:
        self.moe = moe
        self._left_out.fill_(True)
        self._left_out[self._experts()] = False

    # --- calls ----------------------------------------------------------------------------------

    def submit_forward(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        cuda_stream: int | None = None,
    ) -> None:
        """Start the layer, without waiting.

        Parameters
        ----------
        hidden_states : tensor [..., hidden_size]
            bf16, f16 or f32, on the CPU or a GPU.
        topk_ids : int32 or int64 tensor [..., num_experts_per_tok]
            Ids < 0, >= num_experts or in the mask contribute nothing.
        topk_weights : float tensor [..., num_experts_per_tok]
        cuda_stream : int, optional
            Handle of the stream that the call belongs to. With CPU tensors, 0 or None runs it on
            the pool at once; with GPU tensors, None is the current stream.

        Notes
        -----
        The copies of the inputs are taken, or enqueued on the stream, when this returns. In a
        capture (CPU tensors too) they are taken again whenever the graph is replayed.
        """
        self.model.check()
        inputs = Inputs.of(
            hidden_states,
            topk_ids,
            topk_weights,
            self.config.hidden_size,
            self.config.num_experts_per_tok,
        )
        what = self._submission()
        stream = handle_of(cuda_stream, inputs.hidden.device)
        on_pool = not stream and not on_gpu(inputs.hidden)
        captured = not on_pool and _core.stream_is_capturing(stream)
        take = self.model.take(self.layer_idx, inputs.hidden, captured)
        give = self.model.room(self.layer_idx, inputs.hidden, captured) if what.deferred else None
        if on_pool:
            step = submit_on_pool(what, self.model, inputs, give, take)
        else:
            step = submit_on_stream(what, self.model, inputs, stream, captured, give, take)
            if not captured and inputs.hidden.shape[0] in _capture_sizes and on_gpu(inputs.hidden):
                # The capture that follows finds its buffers, and need not make any.
                self.model.staging.captured(inputs.hidden, inputs.ids)
        if give is not None:
            self.model.leave(replace(give, call=step.call))
        self._step = step

    def sync_forward(
        self, hidden_states: torch.Tensor, cuda_stream: int | None = None
    ) -> torch.Tensor:
        """Return the result of the last submission.

        Parameters
        ----------
        hidden_states : tensor
            What was submitted.
        cuda_stream : int, optional
            The stream of the submission.

        Returns
        -------
        tensor [tokens, hidden_size]
            Of the dtype and on the device of `hidden_states`. On a stream it is there when the
            stream has passed this point, and is written again by every replay of a graph.

        Raises
        ------
        RuntimeError
            What went wrong in the call; on a stream, in any earlier one.
        """
        step, self._step = self._step, None
        if step is None:
            raise RuntimeError(
                f"sync_forward of layer {self.layer_idx} was called without a submit_forward"
            )
        if step.stream or on_gpu(hidden_states):
            stream = handle_of(cuda_stream, hidden_states.device)
            if stream != step.stream:
                raise ValueError(
                    f"layer {self.layer_idx} was submitted on stream {step.stream:#x}, but "
                    f"sync_forward names {stream:#x}"
                )
            self.model.check()
            return result_on_stream(step, hidden_states)
        step.call.wait()
        self.model.check()
        return step.out

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        cuda_stream: int | None = None,
    ) -> torch.Tensor:
        """Submit and wait; parameters and result as there."""
        self.submit_forward(hidden_states, topk_ids, topk_weights, cuda_stream)
        return self.sync_forward(hidden_states, cuda_stream)

    __call__ = forward

    def _submission(self) -> Submission:
        if self.moe is None:
            raise RuntimeError(f"layer {self.layer_idx} has no weights: call load_weights first")
        missing = self._left_out & ~self._mask
        if missing.any():
            raise RuntimeError(
                f"expert {int(missing.nonzero()[0])} of layer {self.layer_idx} is to be computed "
                "on the CPU, but was left out of its memory (keep_gpu_experts=False)"
            )
        return Submission(
            self.moe._core,
            f"layer {self.layer_idx}",
            self._mask,
            min(self.max_deferred_experts_per_token, self.config.num_experts_per_tok),
            self.deferral_policy == "batch-union",
        )

    # --- deferred experts -----------------------------------------------------------------------

    def select_deferred_experts(
        self, expert_ids: torch.Tensor, expert_scores: torch.Tensor, protected_k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Divide ids [tokens, k] into those that stay and those that are deferred.

        `protected_k` of each token stay. The other half's entries are -1.
        """
        return select_deferred(
            expert_ids, expert_scores, protected_k, self.config.num_experts, self.deferral_policy
        )

    def flush(self, cuda_stream: int | None = None) -> torch.Tensor | None:
        """Return what this model's last layer has deferred, to be added to its result.

        Returns
        -------
        tensor [tokens, hidden_size], f32, or None
            None: nothing is left. On a stream, there when the stream has passed this point.
        """
        return self.model.flush(cuda_stream)

    # --- weights for GPUs -----------------------------------------------------------------------

    def submit_write_weight_scale_to_buffer(
        self,
        gpu_tp_count: int,
        expert_id: int,
        w13_weight_ptrs: Sequence[int],
        w13_scale_ptrs: Sequence[int],
        w2_weight_ptrs: Sequence[int],
        w2_scale_ptrs: Sequence[int],
    ) -> None:
        """Start writing an expert's weights, as the checkpoint has them, for `gpu_tp_count` GPUs.

        Parameters
        ----------
        gpu_tp_count : int
            GPUs that share the layer.
        expert_id : int
            Slot of the expert.
        w13_weight_ptrs, w13_scale_ptrs, w2_weight_ptrs, w2_scale_ptrs : list of int
            Addresses in CPU memory, one for each GPU; :mod:`ktk.ktmoe.writers` has the layouts.

        Raises
        ------
        ValueError
            When what is stored is no format of a checkpoint, or cannot be cut for so many GPUs.
        """
        if self.moe is None:
            raise RuntimeError(f"layer {self.layer_idx} has no weights: call load_weights first")
        self.sync_write_weight_scale_to_buffer()
        pointers = (w13_weight_ptrs, w13_scale_ptrs, w2_weight_ptrs, w2_scale_ptrs)
        self._write = submit_write(self.moe, gpu_tp_count, expert_id, *pointers)

    def sync_write_weight_scale_to_buffer(self) -> None:
        """Wait until what was submitted is written."""
        write, self._write = self._write, None
        if write is not None:
            write.wait()

    # --- graphs ---------------------------------------------------------------------------------

    @staticmethod
    def set_capture_batch_sizes(capture_bs: Sequence[int]) -> None:
        """Say which numbers of tokens will be captured into graphs.

        Buffers for these are made by the first call of such a size that is not captured, the
        warm-up, so that a capture has none to make.
        """
        if any(int(size) < 1 for size in capture_bs):
            raise ValueError(f"capture batch sizes must be positive, got {list(capture_bs)}")
        _capture_sizes[:] = [int(size) for size in capture_bs]

    @staticmethod
    def get_capture_batch_sizes() -> list[int]:
        """Return what was set."""
        return list(_capture_sizes)

    @staticmethod
    def clear_buffer_cache() -> None:
        """Drop the buffers of all models. Graphs that use them must not be replayed again."""
        clear_all()

    @staticmethod
    def clear_sft_buffer_cache() -> None:
        """Do nothing: there is no fine-tuning mode."""

    def __repr__(self) -> str:
        return f"<ktk.KTMoEWrapper layer {self.layer_idx}, {self.method}: {self.moe}>"
