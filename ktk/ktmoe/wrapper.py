"""One layer of experts behind the interface of kt-kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from ktk import _core
from ktk.ktmoe.arguments import at_least
from ktk.ktmoe.deferral import select_deferred
from ktk.ktmoe.layer import Layer
from ktk.ktmoe.model import clear_all
from ktk.ktmoe.steps import (
    Inputs,
    Submission,
    result_on_stream,
    submit_on_pool,
    submit_on_stream,
)
from ktk.ktmoe.streams import handle_of, is_capturing, on_gpu
from ktk.ktmoe.submitted import Carried, Step
from ktk.ktmoe.writers import submit_write

_capture_sizes: list[int] = []


class KTMoEWrapper(Layer):
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
        NVFP4, MXFP8, GPTQ_INT4, MOE_INT8, MOE_INT4, LLAMAFILE ...
    mode : str
        "inference".
    num_gpu_experts : int, optional
        Experts 0 .. n-1 are the GPU's: what came before the mask.
    lora_rank, lora_alpha, lora_dropout, max_cache_depth, group_size, zero_point, full_weight_grad
        Of the fine-tuning mode, and accepted with kt-kernel's defaults only.
    swiglu_limit, swiglu_alpha : float
        See :func:`ktk.ktmoe.arguments.activation`.
    model : ModelState, optional
        What the layers of a model share; found by weights, sizes and workers if it is not given.
        Give one where layers are replaced, or tried before the model is made.
    deferral_policy : str
        "per-token", or "batch-union" for kt-kernel's own choice; see :mod:`ktk.ktmoe.deferral`.
    keep_gpu_experts : bool
        False: experts that the mask gives to the GPU are not loaded, and take no memory. When the
        mask changes, :meth:`load_cpu_experts` loads them from `weight_path`.
    shards : int, optional
        Parts that weights are divided into, as of :class:`ktk.MoE`: by default one per NUMA node
        that has workers. ``moe.shard_widths`` says what came of it.
    zero_expert_num : int
        Zero experts of the layer, as in :class:`ktk.MoEConfig`; a checkpoint's own number where it
        has some. They are always computed here, and at once: no mask has them, none is deferred.
        Whoever adds them elsewhere gives -1 in the place of their ids.

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

    _step: Step | None = None  # submitted, and not yet waited for
    _write: _core.Job | None = None  # likewise

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
            On the CPU or a GPU. bf16, f16 and f32 are computed as they are, other floats as f32.
        topk_ids : tensor of integers [..., num_experts_per_tok]
            Ids in the mask, and ids that name no expert and no zero expert, contribute nothing.
        topk_weights : tensor of floats [..., num_experts_per_tok]
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
            cuda_stream,
        )
        what = self._submission()
        self.model.check_chain(self.layer_idx, what.deferred > 0)
        on_pool = not inputs.stream and not on_gpu(inputs.hidden)
        captured = not on_pool and is_capturing(inputs.stream, inputs.hidden.device)
        take = self.model.take(self.layer_idx, inputs.hidden, captured, on_pool)
        try:
            step, give = self._start(what, inputs, on_pool, captured, take)
        except BaseException:
            self.model.leave(take)  # the call may be made again
            raise
        self.model.leave(give)
        self._step = step

    def _start(
        self,
        what: Submission,
        inputs: Inputs,
        on_pool: bool,
        captured: bool,
        take: Carried | None,
    ) -> tuple[Step, Carried | None]:
        """Start a call; return it, and what it leaves to the next layer."""
        give = None
        if what.deferred:
            give = self.model.room(
                self.layer_idx, inputs.hidden, None if captured else inputs.stream
            )
        if on_pool:
            step = submit_on_pool(what, self.model, inputs, give, take)
        else:
            step = submit_on_stream(what, self.model, inputs, captured, give, take)
            if not captured and inputs.hidden.shape[0] in _capture_sizes and on_gpu(inputs.hidden):
                # The capture that follows finds its buffers, and need not make any.
                self.model.staging.captured(inputs.hidden, inputs.ids).release()
                if what.deferred:
                    self.model.room(self.layer_idx, inputs.hidden, None)
        return step, give and replace(give, step=step)

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
        step = self._step
        if step is None:
            raise RuntimeError(
                f"sync_forward of layer {self.layer_idx} was called without a submit_forward"
            )
        if hidden_states.device != step.device:
            raise ValueError(
                f"layer {self.layer_idx} was submitted with tensors on {step.device}, but "
                f"sync_forward names one on {hidden_states.device}"
            )
        stream = handle_of(cuda_stream, step.device)
        if stream != step.stream and not step.on_pool:
            raise ValueError(
                f"layer {self.layer_idx} was submitted on stream {step.stream:#x}, but "
                f"sync_forward names {stream:#x}"
            )
        self._step = None
        if not step.on_pool:
            self.model.check()
            return result_on_stream(step)
        step.call.wait()
        self.model.check()
        return step.out.to(step.dtype)

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
        return Submission(
            self.moe._core,
            f"layer {self.layer_idx}",
            self._mask,
            min(self.max_deferred_experts_per_token, self.config.num_experts_per_tok),
            self.deferral_policy == "batch-union",
            self,
        )

    # --- deferred experts -----------------------------------------------------------------------

    def select_deferred_experts(
        self, expert_ids: torch.Tensor, expert_scores: torch.Tensor, protected_k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Divide ids [tokens, k] into those that stay and those that are deferred.

        `protected_k` of each token stay. The other half's entries are -1.
        """
        return select_deferred(
            expert_ids,
            expert_scores,
            protected_k,
            self.config.num_experts,
            self.deferral_policy,
            self.config.zero_expert_num,
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
        NotImplementedError
            When the layer's method has no writer, or what was loaded is not in the method's format:
            the memory behind the addresses has the size that this format means.
        ValueError
            When the weights cannot be cut for so many GPUs, or addresses are missing.
        """
        if self.moe is None:
            raise RuntimeError(f"layer {self.layer_idx} has no weights: call load_weights first")
        self.sync_write_weight_scale_to_buffer()
        pointers = (w13_weight_ptrs, w13_scale_ptrs, w2_weight_ptrs, w2_scale_ptrs)
        self._write = submit_write(
            self.moe, self.method, self._given, gpu_tp_count, expert_id, *pointers
        )

    def sync_write_weight_scale_to_buffer(self) -> None:
        """Wait until what was submitted is written."""
        write, self._write = self._write, None
        if write is not None:
            write.wait()

    # --- graphs ---------------------------------------------------------------------------------

    @staticmethod
    def set_capture_batch_sizes(capture_bs: Iterable[int]) -> None:
        """Say which numbers of tokens will be captured into graphs.

        Buffers for these are made by the first call of such a size that is not captured, the
        warm-up, so that a capture has none to make.
        """
        _capture_sizes[:] = [at_least("a capture batch size", size, 1) for size in capture_bs]

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
