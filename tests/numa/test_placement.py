"""Where weights and scratch memory lie on a machine of several NUMA nodes."""

from __future__ import annotations

import gc
import importlib
import platform
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import numa_layers as layers
import numpy as np
import pytest
from numa_memory import NODES, Mapping, added, bound, pages_by_node, size_on

import ktk
from ktk.cli import health
from ktk.cli.health.machine import Machine

HERE = Path(__file__).parent
IDS = [node["id"] for node in NODES]
BALANCING = Path("/proc/sys/kernel/numa_balancing")
HALVES = (slice(0, layers.SIZE // 2), slice(layers.SIZE // 2, layers.SIZE))


def pool_of(*nodes: int) -> ktk.WorkerPool:
    """Return a pool with the first two CPUs of each of these nodes."""
    return ktk.WorkerPool(cpus=[cpu for node in nodes for cpu in NODES[node]["cpus"][:2]])


def check_pages(mappings: Sequence[Mapping]) -> None:
    """Check that every page of these is where its mapping is bound to, and that there are some."""
    for mapping in mappings:
        assert set(pages_by_node(mapping)) == {mapping.node}


def values(mappings: Sequence[Mapping], node: int) -> int:
    """Return how many values bytes have on a node."""
    return len(np.unique(np.concatenate([one.data() for one in mappings if one.node == node])))


@pytest.mark.parametrize("name", layers.BACKENDS)
@pytest.mark.parametrize("blank", [0, 1])
def test_each_shard_lies_on_its_node(name: str, blank: int) -> None:
    moe = layers.layer(name, pool_of(0, 1))
    given = layers.weights(name, blank=HALVES[blank])
    before = bound()
    moe.load(**given)
    weights = added(before)
    check_pages(weights)
    assert moe.shard_widths == (layers.SIZE // 2,) * 2
    assert sum(mapping.size for mapping in weights) >= moe.nbytes
    # Codes of zero are all the same, and scales and padding are few others.
    assert values(weights, IDS[blank]) < 10
    assert values(weights, IDS[1 - blank]) > 64


def test_rows_of_a_dense_layer_are_divided() -> None:
    linear = ktk.load_backend("BF16").linear(1024, 2048, pool=pool_of(0, 1))
    weight = np.random.default_rng(0).standard_normal((2048, 1024), np.float32)
    weight[1024:] = 0
    before = bound()
    linear.load(weight)
    weights = added(before)
    check_pages(weights)
    assert size_on(weights, IDS[0]) == size_on(weights, IDS[1]) == linear.nbytes // 2
    assert values(weights, IDS[0]) > 64
    assert values(weights, IDS[1]) == 1


def test_scratch_of_workers_lies_on_their_node() -> None:
    pool = pool_of(0, 1)
    assert [NODES[at]["id"] for at in pool.nodes] == [IDS[0], IDS[0], IDS[1], IDS[1]]
    moe = layers.layer("BF16", pool)
    moe.load(**layers.weights("BF16"))
    before = bound()
    layers.compute(moe, 40)
    scratch = added(before)
    check_pages(scratch)
    assert size_on(scratch, IDS[0]) == size_on(scratch, IDS[1]) > 0


@pytest.mark.parametrize("node", [0, 1])
def test_a_pool_on_one_node_uses_its_memory_only(node: int) -> None:
    moe = layers.layer("AMXINT8", pool_of(node))
    before = bound()
    moe.load(**layers.weights("AMXINT8"))
    layers.compute(moe, 5)
    assert moe.shards == 1
    memory = added(before)
    check_pages(memory)
    assert {mapping.node for mapping in memory} == {IDS[node]}


@pytest.mark.parametrize("name", layers.BACKENDS)
def test_two_nodes_compute_the_bits_of_two_shards_on_one(name: str) -> None:
    given = layers.weights(name)
    results = []
    for pool in (pool_of(0, 1), pool_of(0), pool_of(1), ktk.WorkerPool(1)):
        moe = layers.layer(name, pool, shards=2)
        moe.load(**given)
        results.append([layers.compute(moe, tokens) for tokens in (1, 3, 40)])
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(one, other)


def test_memory_is_given_back() -> None:
    # BF16Z: an expert that takes more bytes than others has a mapping of its own.
    pool = pool_of(0, 1)
    first, second = layers.weights("BF16Z"), layers.weights("BF16Z", seed=1)
    for part in ("gate", "up", "down"):
        second[part] *= np.exp2(np.random.default_rng(2).integers(-60, 60, second[part].shape))
    before = bound()
    moe = layers.layer("BF16Z", pool)
    moe.load(**first)

    def touched() -> dict[int, int]:
        found = dict.fromkeys(IDS, 0)
        for mapping in added(before):
            for node, pages in pages_by_node(mapping).items():
                assert node == mapping.node
                found[node] += pages
        return found

    plain = touched()
    moe.load(**second)
    larger = touched()
    assert all(larger[node] > plain[node] for node in IDS)
    moe.load(**first)
    assert touched() == plain
    moe.leave_out(1)
    assert all(touched()[node] < plain[node] for node in IDS)
    del moe
    gc.collect()
    assert added(before) == []
    assert bound() == before


def test_a_pool_of_kt_kernel_takes_the_nodes_that_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The package wants torch, this module of it does not.
    package = types.ModuleType("ktk.ktmoe")
    package.__path__ = [str(Path(ktk.__file__).parent / "ktmoe")]
    monkeypatch.setitem(sys.modules, "ktk.ktmoe", package)
    shared_pool = importlib.import_module("ktk.ktmoe.pools").shared_pool
    last = len(NODES) - 1
    pool = shared_pool(2, 1, (IDS[last],))
    assert set(pool.cpus) <= set(NODES[last]["cpus"])
    both = shared_pool(4, 2, (IDS[1], IDS[0]))
    assert sorted(both.nodes) == [0, 0, 1, 1]


def test_doctor_says_how_weights_are_divided() -> None:
    [numa] = [found for found in health.memory.numa(Machine()) if found.subject == "NUMA"]
    assert numa.state == "ok"
    assert "weights are divided between them" in numa.text


REFUSED = """
import ctypes, sys
import numpy as np
sys.path.insert(0, {here!r})

class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8),
                ("k", ctypes.c_uint32)]
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Filter))]
# As a container: load the number of the call; mbind ends with EPERM, all others are allowed.
rules = (Filter * 4)((0x20, 0, 0, 0), (0x15, 0, 1, {mbind}), (0x06, 0, 0, 0x00050001),
                     (0x06, 0, 0, 0x7FFF0000))
libc = ctypes.CDLL(None, use_errno=True)
program = Program(4, rules)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
assert libc.syscall({mbind}, 0, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1

import numa_layers as layers, numa_memory, test_placement as tests
given = layers.weights("BF16")
low = given["gate"].shape[1] // 2
# bf16 of 1 and of 2: a page says whose it is.
for part in ("gate", "up"):
    given[part][:, :low], given[part][:, low:] = 1, 2
given["down"][:, :, :low], given["down"][:, :, low:] = 1, 2
moe = layers.layer("BF16", tests.pool_of(0, 1))
moe.load(**given)
assert numa_memory.bound() == []
found = numa_memory.pages_of_values((0x3F80, 0x4000))
for shard in (0, 1):
    pages = found[(0x3F80, 0x4000)[shard]]
    assert len(pages) >= moe.nbytes // 2 // numa_memory.PAGE, len(pages)
    nodes = numa_memory.nodes_of(pages)
    right = sum(node == tests.IDS[shard] for node in nodes)
    print("shard", shard, "pages", len(pages), "on its node", right)
    assert right == len(pages), (shard, right, len(pages))
print("result", layers.compute(moe, 3).tobytes().hex()[:64])
"""


def test_first_touch_places_shards_where_mbind_is_refused() -> None:
    if BALANCING.exists() and BALANCING.read_text().strip() != "0":
        pytest.skip("kernel.numa_balancing moves pages to who reads them, this test among others")
    script = REFUSED.format(
        here=str(HERE), mbind={"x86_64": 237, "aarch64": 235}[platform.machine()]
    )
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        # Nothing of it is told anybody.
        assert done.stderr == ""
