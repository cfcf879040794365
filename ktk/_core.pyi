"""
The core of ktk: CPU detection, worker pool, memory, the MoE pipeline and dense layers.
"""

from collections.abc import Sequence
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray


ABI: tuple = (1, 0)

class SettingError(ValueError):
    pass

def detected_isa() -> list[str]:
    """
    Names of the instruction sets that this CPU and operating system offer.
    """

def allowed_isa() -> list[str]:
    """
    Names of the instruction sets that variants may use: detected_isa() and KTK_ISA_FORCE,
    under KTK_ISA.
    """

def slow_isa() -> list[str]:
    """
    Names of those of allowed_isa() that this CPU is faster without: a variant that needs one
    runs where it is named, or where there is no other. What KTK_ISA or KTK_ISA_FORCE name is
    not among them.
    """

def cpu_model() -> str:
    """What the CPU calls itself."""

def cpu_id() -> tuple[str, int, int]:
    """Vendor, family and model of the CPU."""

def prefetch() -> str:
    """
    How weights are fetched ahead of their use on this CPU, as KTK_PREFETCH has it.
    """

def prefetch_row() -> str:
    """
    This CPU's row of the table that `prefetch` comes from, where KTK_PREFETCH is not set.
    """

def set_prefetch(setting: str) -> None:
    """
    Change `prefetch` of this process, for trials; an empty text restores it.

    Raises
    ------
    SettingError
        The text is not like a value of KTK_PREFETCH.
    """

def topology() -> dict:
    """NUMA nodes and CPUs of this process: nodes, quota, default_threads."""

def read_topology(root: str, allowed: Sequence[int]) -> dict:
    """The same, from a copy of /sys below `root`."""

class WorkerPool:
    """
    Threads that compute layers, one call at a time.

    Parameters
    ----------
    threads : int
        Number of workers; 0 takes one per physical core inside the
        affinity mask and the cgroup's quota.
    cpus : list of int, optional
        CPU of each worker; their number is `threads`.
    pin : bool
        Whether workers stay on their CPU.
    """

    def __init__(self, threads: int = 0, cpus: Sequence[int] | None = None, pin: bool = True) -> None: ...

    def __repr__(self) -> str: ...

    def __reduce__(self) -> tuple[object, ...]:
        """Refuses to be pickled."""

    @property
    def size(self) -> int:
        """Number of workers."""

    @property
    def cpus(self) -> list[int]:
        """CPU of each worker, -1 where it is not pinned."""

    @property
    def nodes(self) -> list[int]:
        """Position in topology()['nodes'] of each worker."""

class AbiError(RuntimeError):
    pass

class Format:
    """
    How weights are stored: (element - zero) * scale per group.

    A group spans group_n rows and group_k columns; 0 is the whole extent. ggml's
    types ("q4_k", or "ggml:12") have their scales in their blocks.
    """

    def __init__(self, element: str, scale: str = 'none', zero: str = 'none', group_n: int = 1, group_k: int = 0) -> None: ...

    @property
    def element(self) -> str: ...

    @property
    def scale(self) -> str: ...

    @property
    def zero(self) -> str: ...

    @property
    def group_n(self) -> int: ...

    @property
    def group_k(self) -> int: ...

    @property
    def block(self) -> tuple[int, int]:
        """
        Elements that fill whole bytes together, and these bytes; (0, 0) if ktk knows none.
        """

    def groups(self, n: int, k: int) -> tuple[int, int]:
        """Groups of an n x k matrix: the shape of its scales and zero points."""

    def same_as(self, other: Format, n: int, k: int) -> bool:
        """
        Whether two formats mean the same bytes for an n x k matrix: a group that is at least
        as long as the extent is the whole of it.
        """

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __str__(self) -> str: ...

    def __repr__(self) -> str: ...

class VariantInfo:
    """A variant of a backend: one instruction set."""

    @property
    def name(self) -> str: ...

    @property
    def layout(self) -> str:
        """Variants with the same layout read each other's packed weights."""

    @property
    def required_isa(self) -> list[str]: ...

    @property
    def missing_isa(self) -> list[str]:
        """Instruction sets that this CPU lacks, or KTK_ISA forbids."""

    @property
    def runnable(self) -> bool: ...

    @property
    def m_step(self) -> int: ...

    @property
    def n_step(self) -> int: ...

    @property
    def k_step(self) -> int: ...

    @property
    def exports(self) -> bool:
        """Whether packed weights can be had in the form that a checkpoint has."""

    @property
    def checks_packed(self) -> bool:
        """
        Whether it can tell packed bytes from others, so that files may keep them.
        """

    @property
    def act(self) -> Format:
        """What an activation is encoded as, where that depends on no weight."""

    @property
    def has_act_format(self) -> bool:
        """Whether act_of() may depend on the weight."""

    def act_of(self, stored: Format, n: int, k: int) -> Format:
        """
        What an activation is encoded as that meets an n x k weight of this format.
        """

    @property
    def ukernels(self) -> list[tuple[str, int]]:
        """Name and largest row count of each micro-kernel."""

class Backend:
    """The checked table of a backend."""

    def __init__(self, capsule: object) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def abi(self) -> tuple[int, int]: ...

    @property
    def formats(self) -> list[Format]:
        """Formats that weights are stored in."""

    @property
    def accepts(self) -> list[tuple[Format, int]]:
        """
        Formats that weights may come in, with the index of what they are stored as.
        """

    @property
    def variants(self) -> list[VariantInfo]:
        """Variants, in order of preference."""

    def stored_as(self, given: Format, n: int, k: int, wanted: Format | None = None) -> Format:
        """
        What an n x k weight is stored as: `wanted`, or the backend's choice. ValueError if it
        is not taken.
        """

    def packed_size(self, stored: Format, n: int, k: int, variant: str = '') -> int:
        """
        Bytes of an n x k weight in one of `formats`, packed by a variant; default: the default one.
        """

    def default_variant(self) -> str:
        """
        Name of the variant that runs by default; RuntimeError with the reasons if none does.
        """

class PackedMatrix:
    """
    A weight [n, k] packed by one variant of a backend, for tests and tools.

    `guard` names an operand, one of GUARDS: its memory ends at a page without access, and is
    0xff before it is written. A function that goes further than the size that the backend says
    ends in a RuntimeError or a signal. Inputs and outputs are those of pack and unpack.
    """

    def __init__(self, backend: Backend, variant: str, data: object, scale: object | None = None, zero: object | None = None, *, given: Format | None = None, stored: Format | None = None, force: bool = False, guard: str = "") -> None: ...

    GUARDS: tuple = ...

    @staticmethod
    def size_of(backend: Backend, variant: str, data: object, scale: object | None = None, zero: object | None = None, *, given: Format | None = None, stored: Format | None = None, force: bool = False, guard: str = "") -> int:
        """The `nbytes` that a weight would have, found without packing it."""

    @staticmethod
    def of_bytes(backend: Backend, variant: str, packed: object | None, stored: Format, n: int, k: int, *, force: bool = False, guard: str = '') -> PackedMatrix:
        """
        A matrix of what `buffer` held, uint8 [1, nbytes]. ValueError where the bytes are none,
        or where the backend cannot tell.
        """

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def format(self) -> Format: ...

    @property
    def variant(self) -> str: ...

    @property
    def act(self) -> Format:
        """What activations are encoded as."""

    @property
    def act_size(self) -> int:
        """Bytes of one packed row of activations."""

    @property
    def buffer(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """The packed bytes, writable."""

    def repack(self, data: object | None, scale: object | None = None, zero: object | None = None, *, given: Format | None = None, n_begin: int, n_end: int) -> None:
        """Packs rows [n_begin, n_end) of another weight of the same shape."""

    def unpack(self, n_begin: int = 0, n_end: int | None = None) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]:
        """Rows [n_begin, n_end) as stored, f32."""

    def exported(self, cuts: Sequence[int] = [], apart: int = 0) -> tuple:
        """
        Data, scale and zero point in the stored format, as the bytes of their rows; packing
        them again gives the same matrix. With `cuts`, [0, ..., n] at n_step and whole groups,
        range by range; to rows with `apart` bytes between them. ValueError if the backend
        cannot.
        """

    def padded(self, m: int) -> int:
        """m rounded up to the variant's m_step."""

    def pack_act(self, x: object | None) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, None))]:
        """Encoded rows, uint8 [padded m, act_size]."""

    def pack_act_range(self, x: object | None, k_begin: int, k_end: int, act: object | None) -> None:
        """Encodes columns [k_begin, k_end) of x into `act`."""

    def unpack_act(self, act: object | None, m: int) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]: ...

    def act_round_trip(self, x: object | None) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]: ...

    def matmul(self, x: object | None, n_begin: int = 0, n_end: int | None = None, ukernel: int | None = None) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]:
        """Encodes x and multiplies: f32 [m, n_end - n_begin]."""

    def check_registers(self, x: object | None, n_begin: int = 0, n_end: int | None = None, ukernel: int | None = None) -> None:
        """
        Multiplies as `matmul` does, and raises a RuntimeError with the names of registers that
        `run`, or `enter` and `leave` around it, left changed though they are the caller's by
        the calling convention (System V for x86-64, AAPCS64 for aarch64), of upper halves of
        vectors that were not zeroed, and of AMX tiles that were not released.
        """

    def run_raw(self, act: object | None, m: int, n_begin: int, n_end: int, dst: object | None, ukernel: int | None = None) -> None:
        """Multiplies encoded rows into the caller's memory."""

def activation_names() -> list[str]:
    """Names of the activation functions that layers compute."""

class MoE:
    """The experts of one layer; ktk.MoE is its public face."""

    def __init__(self, backend: object, pool: WorkerPool, config: object, variant: str, force: bool, shards: int, stored: Format | tuple[Format | None, Format | None, Format | None] | None) -> None: ...

    def load_expert(self, expert: int, gate: object | None, up: object | None, down: object | None, gate_scale: object | None = None, up_scale: object | None = None, down_scale: object | None = None, gate_zero: object | None = None, up_zero: object | None = None, down_zero: object | None = None, gate_bias: object | None = None, up_bias: object | None = None, down_bias: object | None = None, gate_factor: object | None = None, up_factor: object | None = None, down_factor: object | None = None, gate_order: object | None = None, up_order: object | None = None, down_order: object | None = None, given: Format | tuple[Format | None, Format | None, Format | None] | None = None, unread: Sequence[tuple[int, int, object, int, int]] = []) -> None:
        """
        An order is int32 [columns]: column i of what is given is column order[i] of the
        matrix. Rows of gate and up, and their biases, are given in the order of down.
        Unread are bytes of gate, up and down that are still in files, for the workers to
        read: descriptor, first byte, the memory, uint8 [bytes], which is that of whole
        matrices, and the size and time of change (ns) that the file has to have at the
        end. Raises OSError, whose filename is an index of unread, or EOFError, whose
        argument it is, where the file has ended or was changed.
        """

    def leave_out(self, expert: int) -> None: ...

    def unload_expert(self, expert: int) -> None: ...

    @property
    def counts(self) -> list[int]:
        """How often each expert was chosen."""

    def reset_counts(self) -> None: ...

    def forward(self, hidden: object | None, topk_ids: object | None, topk_weights: object | None, mask: object | None, out: object | None) -> None: ...

    def unpack_expert(self, expert: int) -> tuple: ...

    @property
    def variant(self) -> str: ...

    @property
    def pool(self) -> WorkerPool: ...

    @property
    def shards(self) -> int: ...

    @property
    def slices(self) -> list[list[int]]:
        """Widths of the slices of each shard; none until an expert is loaded."""

    @property
    def loaded(self) -> list[int]:
        """Experts that are loaded."""

    @property
    def expert_nbytes(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def format(self) -> Format | None: ...

    @property
    def up_format(self) -> Format | None: ...

    @property
    def down_format(self) -> Format | None: ...

class Linear:
    """A dense layer; ktk.Linear is its public face."""

    def __init__(self, backend: object, pool: WorkerPool, in_features: int, out_features: int, variant: str, force: bool, shards: int) -> None: ...

    def load(self, names: Sequence[str], data: Sequence[object], scales: Sequence[object], zeros: Sequence[object], biases: Sequence[object], factors: Sequence[object], orders: Sequence[object], given: Sequence[Format | None], stored: Sequence[Format | None]) -> None:
        """
        Packs parts of a weight, whose rows lie one behind the other: an entry of each list
        for each part.
        """

    def forward(self, x: object | None, out: object | None) -> None: ...

    def look_up(self, ids: object | None, out: object | None) -> None: ...

    def unpack(self) -> Annotated[NDArray[numpy.float32], dict(shape=(None, None))]: ...

    def exported(self) -> list[tuple]:
        """
        For each part its data, scales and zero points as bytes of rows, its factor, and the
        order of its columns, int32 or None.
        ValueError if the backend cannot.
        """

    def bias(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, None))]:
        """The bytes of the bias, f32; none without one."""

    @property
    def variant(self) -> str: ...

    @property
    def pool(self) -> WorkerPool: ...

    @property
    def shards(self) -> int: ...

    @property
    def slices(self) -> list[list[tuple[int, int]]]:
        """
        First row and end of the slices of each shard; none until a weight is loaded.
        """

    @property
    def nbytes(self) -> int: ...

    @property
    def formats(self) -> list[Format]: ...

class LinearGroup:
    """Dense layers that are called one after the other with the same input."""

    def __init__(self, members: Sequence[Linear]) -> None: ...

    def forward(self, index: int, x: object | None, out: object | None) -> None:
        """What the layer alone would write, bit by bit."""

    @property
    def gave_up(self) -> bool:
        """Whether results that nobody asked for are not computed any more."""

class LinearCall:
    """A call of a dense layer that runs later."""

    def __init__(self, linear: Linear, x: object | None, out: object | None) -> None: ...

    def wait(self) -> None:
        """Waits until the output is written; raises what went wrong."""

    @property
    def done(self) -> bool:
        """Whether it has ended."""

def rms_norm(x: object | None, weight: object | None, out: object | None, epsilon: float, offset: float, early: bool, pool: WorkerPool | None = None) -> None:
    """
    Writes rows of x, by the root of their mean square, times weight + offset. early: rounded
    to the dtype of x, which out has too, before that. pool: divides many rows; None: the caller's
    thread computes all.
    """

def rotate(q: object | None, k: object | None, cosine: object | None, sine: object | None, q_out: object | None, k_out: object | None) -> None:
    """
    Writes rows of q and k turned by one position: x cosine + (-second half, first half) sine, with
    each product rounded to the dtype of x. Columns behind those of cosine stay as they are.
    """

def route(x: object | None, weight: object | None, bias: object | None, logits: object | None, scores: object | None, ids: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')], chosen_only: bool) -> None:
    """
    Writes logits x weight^T + bias, of the dtype of `logits`, and of each row's largest, as many
    as ids has columns, the numbers and a softmax over all logits or the chosen ones.
    """

class AttentionStep:
    """Attention of one new token, as one call."""

    def __init__(self, q: Linear, k: Linear, v: Linear, out: Linear, heads: int, shared_heads: int, depth: int, scaling: float, q_norm: tuple[float, float, bool] | None, k_norm: tuple[float, float, bool] | None) -> None:
        """
        A norm is epsilon, offset and early, as of rms_norm; None: there is none.
        """

    def forward(self, x: object | None, cosine: object | None, sine: object | None, q_norm: object | None, k_norm: object | None, keys: object | None, values: object | None, position: int, out: object | None, project: bool) -> None:
        """
        Writes what attention returns for a row x, and its row of keys and values, which are
        [1, shared_heads, room, depth], at `position`; rows before it are read. project: False:
        writes what the last layer would multiply.
        """

def layer_step(attention: AttentionStep, experts: MoE, x: object | None, before: object | None, before_kind: tuple[float, float, bool], cosine: object | None, sine: object | None, q_norm: object | None, k_norm: object | None, keys: object | None, values: object | None, position: int, between: object | None, between_kind: tuple[float, float, bool], weight: object | None, bias: object | None, top_k: int, chosen_only: bool, scores_in_f32: bool, out: object | None) -> None:
    """
    Writes what a layer makes of a row: what rms_norm, AttentionStep.forward, add_rms_norm, route_and_compute
    and a sum would, one after the other, to the same bits.
    """

def route_and_compute(layer: MoE, x: object | None, weight: object | None, bias: object | None, out: object | None, top_k: int, chosen_only: bool, scores_in_f32: bool) -> None:
    """
    Writes what a layer makes of rows x with the choice of `route`, whose scores are rounded to the
    dtype of x, or not at all.
    """

def add_rms_norm(a: object | None, b: object | None, weight: object | None, sum: object | None, out: object | None, epsilon: float, offset: float, early: bool) -> None:
    """Writes a + b and its `rms_norm`."""

class FloatBackend:
    """What gradients are multiplied with: a backend that stores floats."""

    def __init__(self, backend: object) -> None: ...

def forward_with(layer: MoE, hidden: object | None, topk_ids: object | None, topk_weights: object | None, mask: object | None, out: object | None, adapters: Sequence[tuple[int, float, Sequence[object]]], adapter_ids: object | None, kept: object | None) -> None:
    """
    MoE.forward with adapters, or with products of gate and up kept in bf16.
    """

def backward(layer: MoE, floats: FloatBackend, hidden: object | None, topk_ids: object | None, topk_weights: object | None, mask: object | None, grad: object | None, kept: object | None, adapters: Sequence[tuple[int, float, Sequence[object]]], hidden_gradient: object | None, weights_gradient: object | None, factor_gradients: Sequence[object], first_expert: int, num_experts: int, weight_gradients: Sequence[object]) -> None:
    """
    Gradients of a layer of experts; those of factors and of weights are added up.
    """

def linear_backward(linear: Linear, floats: FloatBackend, grad: object | None, x_gradient: object | None) -> None:
    """The gradient of a dense layer's input."""

class Latch:
    """Keeps the first error of calls that nobody waits for."""

    def __init__(self) -> None: ...

    def check(self) -> None:
        """Raises RuntimeError if an error was kept, and forgets it."""

class Carry:
    """An array f32 [tokens, hidden] for what one layer leaves to the next."""

    def __init__(self, sums: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C')]) -> None: ...

class AsyncCall:
    """
    A call of a layer that runs later. Its inputs are copied when it is made, unless
    options say otherwise.
    """

    def __init__(self, layer: MoE, hidden: object | None, topk_ids: object | None, topk_weights: object | None, mask: object | None, out: object | None, errors: Latch | None = None, *, name: str = '', live: bool = False, stable: bool = False, deferred: int = 0, batch_union: bool = False, give: object | None = None, take: object | None = None) -> None: ...

    def start(self) -> None:
        """Queues the call behind others of its pool."""

    def wait(self, all: bool = False) -> None:
        """
        Waits until the output is written; `all`: until the deferred half has ended, too. Raises
        what went wrong unless the call has a latch for errors.
        """

    @property
    def done(self) -> bool:
        """Whether it was started, and has ended."""

    def start_on(self, stream: int) -> None:
        """Lets a CUDA stream start the call; in a capture, at every replay."""

    def wait_on(self, stream: int, all: bool = False) -> None:
        """Lets a CUDA stream wait for the call."""

class Job:
    """Work on a pool's queue."""

    def wait(self) -> None:
        """Waits for its end; raises what went wrong in it."""

def submit_write(layer: MoE, expert: int, ranks: Sequence[Sequence[int]], wide_scales: bool) -> Job:
    """
    Queues writing an expert, as its checkpoint has it, to the addresses (w13, w13_scale, w2,
    w2_scale) of each GPU.
    """

def drain(pool: WorkerPool) -> None:
    """
    Waits for what is queued on a pool, whose queue has a thread from then on.
    """

def split_deferred(topk_ids: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], topk_weights: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], num_experts: int, deferred: int, batch_union: bool = False, zero_experts: int = 0) -> tuple:
    """
    Ids that stay, those of zero experts among them, and ids that are deferred; -1 elsewhere.
    """

def stream_is_capturing(stream: int) -> bool:
    """Whether a CUDA stream is being captured into a graph."""

def cuda_library() -> str:
    """The CUDA driver's library; RuntimeError says why there is none."""

@overload
def expert_ids(ids: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], experts: int) -> object: ...

@overload
def expert_ids(ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], experts: int) -> object:
    """
    Ids as int32, checked: ValueError for what is neither an expert nor -1.
    """

def divide_tokens(ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], held: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)], home: int) -> list:
    """
    What each rank computes of the tokens of a call: (rank, rows or None for all, ids with -1
    in place of other ranks' experts). `held` has a row for each expert, and is not 0 in the
    columns of ranks that hold it. Ids are those of `expert_ids`; of those behind all experts,
    which are zero experts, a rank takes care that computes an expert of the token anyway.
    """
