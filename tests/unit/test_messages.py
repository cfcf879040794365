"""Whatever is given instead of what is meant, the answer is a sentence and no C++ signature."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ktk
from ktk import _core
from ktk.config import ACTIVATIONS, PARTS

E, K, H, I = 3, 2, 64, 32  # noqa: E741


def config(**changes: Any) -> dict[str, Any]:
    sizes = {
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "intermediate_size": I,
    }
    return sizes | changes


def expert() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def moe() -> ktk.MoE:
    layer = ktk.load_backend("BF16").moe(**config())
    for e in range(E):
        layer.load_expert(e, **expert())
    return layer


def call() -> dict[str, Any]:
    return {
        "hidden": torch.ones(4, H),
        "topk_ids": torch.tensor([[0, 2]] * 4),
        "topk_weights": torch.ones(4, K),
        "mask": torch.zeros(E, dtype=torch.bool),
        "out": torch.empty(4, H),
    }


def read_only() -> np.ndarray:
    array = np.empty((4, H), np.float32)
    array.flags.writeable = False
    return array


def fake() -> torch.Tensor:
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        return mode.from_tensor(torch.ones(4, H))


#: What a call is given in place of an argument, and what is said.
WRONG = {
    "a list": ("topk_ids", [[0, 2]] * 4, "topk_ids must be an array in CPU memory .*, got list"),
    "a list of bools": ("mask", [True] * E, "mask must be an array .*, got list"),
    "nothing": ("topk_ids", None, "topk_ids must be an array .*, got None"),
    "a string": ("topk_weights", "ones", "topk_weights must be an array .*, got str"),
    "meta": ("hidden", torch.ones(4, H, device="meta"), "got torch.Tensor on meta"),
    "sparse": ("hidden", torch.ones(4, H).to_sparse(), "got torch.Tensor of layout sparse_coo"),
    "strings": ("hidden", np.array([["a"] * H] * 4), "hidden must be .* got ndarray of <U1"),
    "objects": ("hidden", np.array([[None] * H] * 4), "hidden must be .* got ndarray of object"),
    "traced": ("hidden", fake(), "hidden is a tensor without values, with which torch traces"),
    "read-only": ("out", read_only(), "out is read-only; expected an array that may be written"),
    "doubles": (
        "hidden",
        torch.ones(4, H).double(),
        "^hidden has dtype float64; expected float32, float16 or bfloat16$",
    ),
    "weights in double": (
        "topk_weights",
        torch.ones(4, K).double(),
        "^topk_weights has dtype float64; expected float32, float16 or bfloat16$",
    ),
    "eight bits": (
        "hidden",
        torch.ones(4, H).to(torch.float8_e4m3fn),
        "^hidden has dtype float8_e4m3fn; expected float32, float16 or bfloat16$",
    ),
    "bytes": (
        "out",
        torch.empty(4, H, dtype=torch.int8),
        "^out has dtype int8; expected float32, float16 or bfloat16$",
    ),
    "float ids": ("topk_ids", torch.ones(4, K), "topk_ids must be int32 or int64, got"),
    "an int mask": ("mask", torch.zeros(E, dtype=torch.int64), "mask must be bool, got"),
}


@pytest.mark.parametrize("run", [ktk.MoE.__call__, ktk.MoE.submit])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_call(moe: ktk.MoE, run: Callable[..., Any], wrong: str) -> None:
    name, value, message = WRONG[wrong]
    with pytest.raises(TypeError, match=message):
        run(moe, **call() | {"out": torch.empty(4, H), name: value})


@pytest.mark.parametrize("value", [None, "text", [[1.0]], torch.ones(I, H, device="meta")])
@pytest.mark.parametrize("part", ["gate", "down"])
def test_an_expert(moe: ktk.MoE, part: str, value: Any) -> None:
    with pytest.raises(TypeError, match=part) as error:
        moe.load_expert(0, **expert() | {part: value})
    assert "incompatible function arguments" not in str(error.value)


@pytest.mark.parametrize("beside", ["gate_scale", "up_zero", "down_bias"])
def test_what_stands_beside_an_expert(moe: ktk.MoE, beside: str) -> None:
    with pytest.raises((TypeError, ValueError), match=beside) as error:
        moe.load_expert(0, **expert(), **{beside: "text"})
    assert "incompatible function arguments" not in str(error.value)


def test_all_experts(moe: ktk.MoE) -> None:
    stacks = {name: [matrix] * E for name, matrix in expert().items()}
    for wrong, message in (
        ({"up": 3}, "up must have an entry for each expert, got 3"),
        ({"gate": 0.5}, "gate must have an entry for each expert, got 0.5"),
        ({"gate": None}, "gate is missing, and the experts of this layer have one"),
        ({"down_bias": 0.5}, "down_bias must have an entry for each expert, got 0.5"),
        ({"physical_to_logical_map": 2}, "physical_to_logical_map must be a sequence of ints"),
        ({"physical_to_logical_map": [0, 1.9, 2]}, "must be a sequence of ints, got 1.9 in it"),
        ({"physical_to_logical_map": ["0", 1, 2]}, "must be a sequence of ints, got '0' in it"),
        ({"physical_to_logical_map": torch.ones(3)}, "must be a sequence of ints, got tensor"),
    ):
        with pytest.raises(TypeError, match=message):
            moe.load(**stacks | wrong)
    orders: list[Any] = [(0, np.int64(2), 1), np.array([0, 2, 1], np.uint8), torch.arange(3)]
    for order in orders:
        moe.load(*map(stacks.get, PARTS), physical_to_logical_map=order)


@pytest.mark.parametrize("use", [ktk.MoE.leave_out, ktk.MoE.unpack_expert])
def test_a_slot(moe: ktk.MoE, use: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="expert must be an int, got 'one'"):
        use(moe, "one")
    for slot in (E, -1, 2**70):
        with pytest.raises(IndexError, match=f"expert {slot} is not one of {E}"):
            use(moe, slot)


def test_an_expert_that_is_not_there() -> None:
    layer = ktk.load_backend("BF16").moe(**config())
    with pytest.raises(
        RuntimeError, match=r"no expert is loaded: call load\(\) or load_expert\(\)"
    ):
        layer(**call())
    layer.load_expert(0, **expert())
    with pytest.raises(RuntimeError, match="expert 2 is not loaded"):
        layer(**call())
    assert "1 loaded of 3 experts" in repr(layer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": 3}, "variant must be the name of a variant or None, got 3"),
        ({"pool": 4}, "pool must be a ktk.WorkerPool or None, got 4"),
        ({"shards": "two"}, "shards must be an int, got 'two'"),
        ({"shards": 2**31 - 1}, "shards must be at most 1024, got 2147483647"),
        ({"shards": 0}, "shards must be at least 1, got 0"),
        ({"num_experts": 2**70}, "num_experts must be an integer from 1 to 16777216"),
        (
            {"activation": "mish"},
            "activation must be one of silu, swigluoai, .*, got 'mish'",
        ),
        ({"activation_limit": "7"}, "activation_limit must be a positive number or None, got '7'"),
        ({"activation_limit": -(10**400)}, "limit must be .*, which is -inf in f32"),
        ({"activation_limit": 1e39}, r"limit must be .*, got 1e\+39, which is inf in f32"),
        ({"activation_alpha": float("inf")}, "activation_alpha must be a number, got inf$"),
        ({"activation_limit": 1e-50}, "limit must be .*, got 1e-50, which is 0.0 in f32"),
        ({"activation_alpha": None}, "activation_alpha must be a number, got None"),
        ({"activation_alpha": float("nan")}, "activation_alpha must be a number, got nan"),
        ({"activation_alpha": 1e39}, "alpha must be a number, got 1e\\+39, which is inf in f32"),
        ({"clamp_gate_below": 1}, "clamp_gate_below must be a bool, got 1"),
    ],
)
def test_a_layer(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ktk.load_backend("BF16").moe(**config(**changes))


def test_a_pool_that_does_not_start_is_no_fault_of_a_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_threads() -> Any:
        raise RuntimeError("the system started 0 of 2 threads")

    backend = ktk.load_backend("BF16")
    for module, make in (
        ("ktk.moe", lambda: backend.moe(**config())),
        ("ktk.linear", lambda: ktk.Linear(backend, 8, 8)),
    ):
        monkeypatch.setattr(f"{module}.default_pool", no_threads)
        with pytest.raises(RuntimeError, match="started 0 of 2 threads") as caught:
            make()
        assert type(caught.value) is RuntimeError


def test_a_layer_of_no_backend() -> None:
    with pytest.raises(
        TypeError, match=r"backend must be a Backend of ktk.load_backend, got 'BF16'"
    ):
        ktk.MoE("BF16", ktk.MoEConfig(**config()))  # type: ignore[arg-type]


def test_a_layer_of_no_configuration() -> None:
    with pytest.raises(TypeError, match=r"config must be a ktk.MoEConfig, got \{'num_experts': 3,"):
        ktk.MoE(ktk.load_backend("BF16"), config())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"activation": "mish"}, ValueError, r"activation must be one of .*silu.*, got 'mish'"),
        ({"activation": 77}, TypeError, "activation must be a name, got 77"),
        ({"hidden_size": -1}, TypeError, "hidden_size must be a size, got -1"),
        ({"activation_limit": 0}, ValueError, "activation_limit must be positive"),
        ({"activation_alpha": "x"}, TypeError, "activation_alpha must be a number or None"),
        ({"clamp_gate_below": "x"}, TypeError, "clamp_gate_below must be a bool, got 'x'"),
    ],
)
def test_the_core_reads_a_configuration_by_its_names(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """What ktk.MoEConfig has refused before cannot come through another object either."""
    core, pool = ktk.load_backend("BF16").core, ktk.default_pool()
    sound = vars(ktk.MoEConfig(**config()))

    def make(**changes: Any) -> None:
        _core.MoE(core, pool, SimpleNamespace(**sound | changes), "", False, 0, None)

    for activation in ACTIVATIONS:
        make(activation=activation)
    with pytest.raises(error, match=message):
        make(**changes)


def test_softcaps_belong_to_one_activation() -> None:
    with pytest.raises(ValueError, match="'situ' needs gate_softcap"):
        ktk.MoEConfig(**config(), activation="situ")
    with pytest.raises(ValueError, match="'situ' needs gate_softcap"):
        ktk.MoEConfig(**config(), activation="situ", up_softcap=3.0)
    assert ktk.MoEConfig(**config(), activation="situ", gate_softcap=3.0).up_softcap is None
    with pytest.raises(ValueError, match="'silu' does not take up_softcap"):
        ktk.MoEConfig(**config(), up_softcap=3.0)
    with pytest.raises(ValueError, match="gate_softcap must be a positive number or None, got 0"):
        ktk.MoEConfig(**config(), activation="situ", gate_softcap=0, up_softcap=1.0)
    for name, value in (("gate_softcap", 1e39), ("up_softcap", 1e-46)):
        caps: dict[str, Any] = {"gate_softcap": 1.0, "up_softcap": 1.0} | {name: value}
        with pytest.raises(ValueError, match=f"{name} must be .*, which is (inf|0.0) in f32"):
            ktk.MoEConfig(**config(), activation="situ", **caps)


def test_sizes_may_be_integers_of_any_library() -> None:
    sizes: dict[str, Any] = {name: np.int64(value) for name, value in config().items()}
    assert ktk.MoEConfig(**sizes) == ktk.MoEConfig(**config())
    assert type(ktk.MoEConfig(**sizes).hidden_size) is int
    with pytest.raises(ValueError, match=r"num_experts must be an integer .*, got True"):
        ktk.MoEConfig(**config() | {"num_experts": True})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ktk.WorkerPool("4"),  # type: ignore[arg-type]
            r"threads must be a number of threads \(an int\), got '4'",
        ),
        (lambda: ktk.WorkerPool(2**40), "threads must be a number of threads"),
        (
            lambda: ktk.WorkerPool(thread=4),  # type: ignore[call-arg]
            "no argument 'thread'; it takes threads, cpus, pin",
        ),
        (
            lambda: ktk.WorkerPool(1, None, True, 4),  # type: ignore[call-arg]
            "takes at most 3 arguments, got 4",
        ),
        (
            lambda: ktk.WorkerPool(1, threads=2),  # type: ignore[misc]
            "got the argument 'threads' twice",
        ),
        (
            lambda: ktk.WorkerPool(cpus="ab"),  # type: ignore[arg-type]
            "cpus must be a list of ints or None, got 'ab'",
        ),
        (lambda: ktk.WorkerPool(pin=1), "pin must be a bool, got 1"),  # type: ignore[arg-type]
        (lambda: ktk.WorkerPool(10_000), "10000 threads are more than a machine with"),
        (lambda: ktk.WorkerPool(cpus=[0] * 10_000), "10000 threads are more than a machine with"),
        (lambda: ktk.WorkerPool(-1), "number of threads >= 0, got -1"),
        (
            lambda: ktk.Format(3),  # type: ignore[arg-type]
            'element must be the name of an element, as "f32", got 3',
        ),
        (lambda: ktk.Format(), "needs the argument 'element'"),  # type: ignore[call-arg]
        (lambda: ktk.Format("f32", group_k=-1), "group_k must be an int from 0 to"),
        (
            lambda: ktk.Format("f32", groups=3),  # type: ignore[call-arg]
            "no argument 'groups'",
        ),
    ],
)
def test_pools_and_formats(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_matrices_of_the_tools() -> None:
    core, weight = ktk.load_backend("BF16").core, expert()["gate"]
    for wrong, message in (
        ((None, "", weight), "backend must be a backend's core, got None"),
        ((core, 3, weight), "variant must be the name of a variant, got 3"),
        ((core, "", [[1.0]]), "weight must be an array .*, got list"),
        ((core, ""), "weight must be an array .*, got None"),
        ((core, "", weight, "scale"), "weight_scale must be an array .*, got str"),
    ):
        with pytest.raises(TypeError, match=message):
            _core.PackedMatrix(*wrong)
    matrix = _core.PackedMatrix(core, "", weight)
    for use in (matrix.matmul, matrix.pack_act, matrix.act_round_trip):
        with pytest.raises(TypeError, match="x must be contiguous float32 in two dimensions, got"):
            use(np.ones((2, H)))
        with pytest.raises(TypeError, match="x must be contiguous float32 in two dimensions, got"):
            use(np.ones((2, 2 * H), np.float32)[:, :H])
        with pytest.raises(TypeError, match=r"x must be an array .*, got None"):
            use(None)
    with pytest.raises(TypeError, match="dst is read-only"):
        matrix.run_raw(matrix.pack_act(np.ones((4, H), np.float32)), 4, 0, I, read_only())


@pytest.mark.slow
def test_torch_compile_computes_the_same(moe: ktk.MoE) -> None:
    given = call()
    x, rest = given["hidden"], {name: given[name] for name in ("topk_ids", "topk_weights")}
    expected = moe(x * 2, **rest) + 1
    for run in (moe, lambda *a, **k: moe.submit(*a, **k).wait()):
        compiled = torch.compile(lambda x, run=run: run(x * 2, **rest) + 1, backend="eager")
        assert torch.equal(compiled(x), expected)


def test_what_belongs_to_a_process_is_not_pickled(moe: ktk.MoE) -> None:
    ticket = moe.submit(**call())
    for thing, name in (
        (moe, "MoE"),
        (moe.pool, "WorkerPool"),
        (moe.backend, "Backend"),
        (ticket, "Ticket"),
    ):
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=f"a ktk.{name} cannot be pickled or copied: "):
                way(thing)
    ticket.wait()
    assert repr(ticket) == "<ktk.Ticket: done>"


def test_a_pool_shows_its_workers() -> None:
    assert repr(ktk.WorkerPool(3, pin=False)) == "<ktk.WorkerPool: 3 workers, not pinned>"
    pool = ktk.WorkerPool(1)
    assert repr(pool) == f"<ktk.WorkerPool: 1 worker on CPUs {pool.cpus[0]}>"
