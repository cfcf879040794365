"""`ktk.Linear` as users call it; of its numbers, a few beside the conformance kit."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

import ktk
from ktk import _core
from ktk.expert import Matrix
from ktk.quantize import quantize
from ktk.testing import bounds, dense, ggml
from ktk.testing.sources import Source
from ktk.testing.subject import Subject

K, N = 128, 96


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHT, X = random(N, K) / 8, random(5, K, seed=1)


def make(**keywords: Any) -> ktk.Linear:
    return ktk.Linear("BF16", K, N, **keywords)


@pytest.fixture(scope="module")
def linear() -> ktk.Linear:
    return make().load(WEIGHT.bfloat16())


def expected(x: torch.Tensor, linear: ktk.Linear) -> torch.Tensor:
    """Return the product with the weight as it is stored, in float64."""
    return x.double() @ torch.from_numpy(linear.unpack()).double().T


def test_a_backend_is_named_or_loaded_or_makes_it() -> None:
    backend = ktk.load_backend("BF16")
    weight = WEIGHT.bfloat16()
    results = [
        one.load(weight)(X)
        for one in (ktk.Linear("bf16", K, N), ktk.Linear(backend, K, N), backend.linear(K, N))
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    with pytest.raises(ktk.BackendNotFound):
        ktk.Linear("BF61", K, N)
    with pytest.raises(TypeError, match="a name or a Backend"):
        ktk.Linear(3, K, N)  # type: ignore[arg-type]


def test_any_leading_dimensions(linear: ktk.Linear) -> None:
    whole = linear(X)
    assert torch.equal(linear(X[0]), whole[0])
    x = random(3, 1, 4, K, seed=2)
    y = linear(x)
    assert y.shape == (3, 1, 4, N)
    assert torch.equal(y.reshape(12, N), linear(x.reshape(12, K)))
    assert linear(x[:0]).shape == (0, 1, 4, N)
    assert torch.equal(linear(x[:, :, 1:3]), y[:, :, 1:3])  # rows at two distances
    assert torch.equal(linear(x.transpose(0, 2)), y.transpose(0, 2))
    assert torch.equal(linear(x.flip(0)), y.flip(0))
    assert torch.equal(linear(x[:1].expand(3, 1, 4, K))[2], y[0])
    columns = x.reshape(12, K).T.contiguous().T  # no two elements of a row are neighbours
    assert torch.equal(linear(columns), y.reshape(12, N))
    assert np.array_equal(linear(x.numpy()[::-1, 0, ::2]), y.numpy()[::-1, 0, ::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_output_is_rounded_to_the_dtype_of_the_input(
    linear: ktk.Linear, dtype: torch.dtype
) -> None:
    x = X.to(dtype)
    y = linear(x)
    assert y.dtype == dtype
    assert torch.equal(y, linear(x, out=torch.empty(5, N)).to(dtype))
    torch.testing.assert_close(y.double(), expected(x, linear), rtol=2**-7, atol=1e-2)


def test_out_may_be_strided_and_overlap_the_input(linear: ktk.Linear) -> None:
    square = ktk.Linear("BF16", K, K).load(random(K, K).bfloat16())
    for tokens in (1, 3, 300):  # few are encoded by each worker for itself
        x = random(tokens, K, seed=3)
        y = square(x)
        own = x.clone()
        assert square(own, out=own) is own
        assert torch.equal(own, y)
        beside = torch.cat([x, x], dim=1)
        square(beside[:, :K], out=beside[:, K:])
        assert torch.equal(beside, torch.cat([x, y], dim=1))
        shifted = torch.cat([x, x[:1]])
        square(shifted[:-1], out=shifted[1:])
        assert torch.equal(shifted, torch.cat([x[:1], y]))
    with pytest.raises(ValueError, match=r"out must have shape \[5, 96\], got \[5, 95\] float32"):
        linear(X, out=torch.empty(5, N - 1))
    with pytest.raises(ValueError, match="out must not overlap itself"):
        linear(X, out=torch.empty(1, N).expand(5, N))
    with pytest.raises(ValueError, match="out must have all its rows at one distance"):
        linear(random(2, 2, K), out=torch.empty(2, 3, N)[:, :2])
    with pytest.raises(TypeError, match="out has dtype int8"):
        linear(X, out=torch.empty(5, N, dtype=torch.int8))


def test_parts_give_the_bits_of_layers_of_their_own() -> None:
    backend = ktk.load_backend("LLAMAFILE")
    formats = {fmt.element: fmt for fmt in backend.formats}
    gguf = pytest.importorskip("gguf")
    k, sizes = 512, {"Q4_K": 96, "Q8_0": 32, "Q6_K": 64}
    parts, sources = [], []
    for seed, (name, n) in enumerate(sizes.items()):
        kind = getattr(gguf.GGMLQuantizationType, name)
        columns, size = gguf.GGML_QUANT_SIZES[kind]
        if name == "Q8_0":
            data = gguf.quants.quantize(random(n, k, seed=seed).numpy(), kind)
        else:  # any bytes are blocks; f16 scales of 2^-10
            data = np.random.default_rng(seed).integers(0, 256, (n, k // columns * size), np.uint8)
            blocks = data.reshape(-1, size)
            at = slice(0, 4) if name == "Q4_K" else slice(size - 2, size)
            blocks[:, at] = np.tile(np.array([0, 0x14], np.uint8), blocks[:, at].shape[1] // 2)
        fmt = formats[name.lower()]
        parts.append(Matrix(fmt, data))
        sources.append(Source(fmt, fmt, data, None, None, ggml.decode(fmt.element, data)))
    fused = ktk.Linear(backend, k, sum(sizes.values())).load(parts)
    variant = next(one for one in backend.variants if one.name == fused.variant)
    layer, subject = dense.Dense(sources, None), Subject(backend, variant)
    assert [fmt.element for fmt in fused.formats] == [name.lower() for name in sizes]
    for tokens in (1, 3, 70):
        x = random(tokens, k, seed=7)
        y = fused(x)
        alone = [ktk.Linear(backend, k, len(m.data)).load(m)(x) for m in parts]
        assert torch.equal(y, torch.cat(alone, dim=1))
        wanted = layer.expected(subject, fused, x.numpy())
        bounds.check(y.numpy(), wanted.value, wanted.error, f"{tokens} tokens")
    ids = [0, 95, 96, 127, 128, 191]
    assert np.array_equal(fused.rows(ids), fused.unpack()[ids])


def test_bias() -> None:
    bias = random(N, seed=4)
    plain = make().load(WEIGHT)
    with_bias = make(bias=True).load(WEIGHT, bias=bias)
    assert torch.equal(with_bias(X), plain(X) + bias)
    halves = make(bias=True).load([WEIGHT[:32], WEIGHT[32:]], bias=[None, bias[32:].bfloat16()])
    rounded = bias.bfloat16().float()
    rounded[:32] = 0
    assert torch.equal(halves(X), plain(X) + rounded)
    with pytest.raises(ValueError, match="the bias is missing"):
        make(bias=True).load(WEIGHT)
    with pytest.raises(ValueError, match="make the layer with bias=True"):
        make().load(WEIGHT, bias=bias)
    with pytest.raises(ValueError, match=r"must have shape \[96\], got \[95\]"):
        make(bias=True).load(WEIGHT, bias=bias[1:])


def test_what_checkpoints_store_is_computed_as_it_is() -> None:
    codes = quantize(WEIGHT, "i8-f32-row")
    linear = ktk.Linear("AMXINT8", K, N).load(codes)
    assert np.array_equal(linear.unpack(), codes.dequantize().numpy())
    same = ktk.Linear("AMXINT8", K, N).load(codes.data, codes.scale, given="i8-f32-row")
    assert torch.equal(linear(X), same(X))
    parts = ktk.Linear("AMXINT8", K, N)
    assert codes.scale is not None
    parts.load([codes.data[:32], codes.data[32:]], [codes.scale[:32], codes.scale[32:]])
    assert torch.equal(linear(X), parts(X))
    with pytest.raises(ValueError, match="scale must be a list with an entry for each of 2 parts"):
        parts.load([codes.data[:32], codes.data[32:]], codes.scale)


def test_rows(linear: ktk.Linear) -> None:
    stored = linear.unpack()
    assert np.array_equal(stored, WEIGHT.bfloat16().float().numpy())
    rows = linear.rows([3, 0, 3, N - 1])
    assert np.array_equal(rows, stored[[3, 0, 3, N - 1]])
    ids = torch.tensor([[1, 2, 90], [2, 2, 40]], dtype=torch.int32)
    many = linear.rows(ids)
    assert isinstance(many, torch.Tensor)
    assert np.array_equal(many.numpy(), stored[ids.numpy()])
    out = torch.empty(3, 2, K, dtype=torch.bfloat16)
    assert linear.rows(ids.T, out=out) is out
    assert torch.equal(out, WEIGHT.bfloat16()[ids.T.long()])
    assert linear.rows(np.zeros((0, 4), np.int64)).shape == (0, 4, K)
    everything = np.random.default_rng(0).integers(0, N, 1000)
    assert np.array_equal(linear.rows(everything), stored[everything])
    for wrong in (-1, N):
        with pytest.raises(IndexError, match=f"id {wrong} is not one of {N} rows"):
            linear.rows([0, wrong])
    assert linear.rows([]).shape == (0, K)
    assert np.array_equal(linear.rows(range(3)), stored[:3])
    for nonsense in (np.zeros(3, np.float32), [1.0], [True], 3, None, "ab"):
        with pytest.raises(TypeError, match="ids must be "):
            linear.rows(nonsense)


def test_submitted_calls_run_in_order(linear: ktk.Linear) -> None:
    x = X.clone()
    y = linear(x)
    ticket = linear.submit(x)
    x.zero_()
    second = linear.submit(x)
    assert torch.equal(ticket.wait(), y)
    assert ticket.done
    assert ticket.wait() is ticket.wait()
    assert not second.wait().any()
    out = np.full((5, N), np.nan, np.float32)
    linear.submit(X.numpy(), out=out)  # dropped, which waits
    assert np.array_equal(out, y.numpy())
    ticket = make().submit(X)
    with pytest.raises(RuntimeError, match="no weight is loaded"):
        ticket.wait()
    assert not ticket.result.__self__._out.any()  # type: ignore[attr-defined]


def test_loading_again_replaces_the_weight() -> None:
    linear = make()
    assert (linear.nbytes, linear.formats) == (0, ())
    for call in (lambda: linear(X), lambda: linear.rows([0])):
        with pytest.raises(RuntimeError, match=r"no weight is loaded: call load\(\) first"):
            call()
    linear.load(WEIGHT)
    first = linear(X)
    with pytest.raises(ValueError, match="rows, expected 96"):
        linear.load(WEIGHT[1:])
    assert torch.equal(linear(X), first)
    linear.load(-WEIGHT)
    assert torch.equal(linear(X), -first)


def test_weights_of_another_shape_are_refused() -> None:
    for wrong, sentence in (
        (WEIGHT[:, 1:], r"weight must have shape \[any, 128\], got \[96, 127\] float32"),
        (WEIGHT[0], r"weight must have shape \[any, 128\]"),
        ([WEIGHT, WEIGHT], "the parts of weight have 192 rows, expected 96"),
        ([WEIGHT[:50], WEIGHT[:46, 2:]], r"weight\[1\] must have shape \[any, 128\]"),
        ([WEIGHT, WEIGHT[:0]], r"weight\[1\] has no rows"),
        ([], "weight has no parts"),
        (WEIGHT.to(torch.uint8), "uint8"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make().load(wrong)
    with pytest.raises(TypeError, match="weight is missing"):
        make().load(None)


def test_sizes_and_options_are_checked() -> None:
    for name in ("in_features", "out_features"):
        sizes: dict[str, Any] = {"in_features": K, "out_features": N}
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            ktk.Linear("BF16", **sizes | {name: 0})
        with pytest.raises(TypeError, match=f"{name} must be an int"):
            ktk.Linear("BF16", **sizes | {name: "many"})
    with pytest.raises(ValueError, match="can be split into at most 3 shards, not 4"):
        make(shards=4).load(WEIGHT)
    with pytest.raises(ValueError, match="shards must be at least 1"):
        make(shards=0)
    with pytest.raises(ValueError, match="shards must be at most 1024"):
        make(shards=1 << 40)
    with pytest.raises(TypeError, match="weight_format must be a Format, its name or a list"):
        make(weight_format=3)
    with pytest.raises(ValueError, match="has no variant 'nope'"):
        make(variant="nope")
    with pytest.raises(ValueError, match="is not the name of a format"):
        make(weight_format="nonsense-9")


def test_shards_and_threads_change_no_bits() -> None:
    x = random(70, K, seed=5)
    wanted = make().load(WEIGHT)(x)
    for shards in (1, 2, 3):
        for threads in (1, 3):
            linear = make(shards=shards, pool=ktk.WorkerPool(threads, pin=False)).load(WEIGHT)
            assert linear.shards == shards
            assert torch.equal(linear(x), wanted)
            for row in (0, 41):
                assert torch.equal(linear(x[row]), wanted[row])


def test_many_tokens_and_few_columns() -> None:
    """More tokens than a chunk takes, and so few columns that rows are divided as well."""
    linear = ktk.Linear("BF16", K, 3, pool=ktk.WorkerPool(3, pin=False)).load(WEIGHT[:3])
    # Some variants round activations to bf16: these are bf16 already.
    x = random(9000, K, seed=6).bfloat16().float()
    y = linear(x)
    at = [0, 31, 32, 4095, 4096, 8191, 8999]
    assert torch.equal(y[at], torch.stack([linear(x[i]) for i in at]))
    torch.testing.assert_close(y.double(), expected(x, linear), rtol=1e-4, atol=1e-4)


def test_gradients_are_refused(linear: ktk.Linear) -> None:
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="x requires grad, but ktk computes inference only"):
        linear(x)
    with pytest.raises(RuntimeError, match="x requires grad"):
        linear.submit(x)
    with pytest.raises(RuntimeError, match="weight requires grad"):
        make().load(WEIGHT.clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(linear(x), linear(X))


def test_a_layer_is_not_pickled_or_copied(linear: ktk.Linear) -> None:
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"ktk\.Linear cannot be pickled or copied"):
            attempt(linear)


def test_what_it_says_of_itself(linear: ktk.Linear) -> None:
    assert (linear.in_features, linear.out_features, linear.bias) == (K, N, False)
    assert [fmt.element for fmt in linear.formats] == ["bf16"]
    assert linear.nbytes == N * K * 2
    assert linear.variant in [variant.name for variant in linear.backend.variants]
    assert repr(linear).startswith(f"<ktk.Linear BF16/{linear.variant}: 128 -> 96, ")


def test_calls_from_threads_take_turns() -> None:
    linear, wanted = make().load(WEIGHT), make().load(WEIGHT)(X)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for i in range(50):
            if seed == 0 and i % 10 == 0:
                linear.load(WEIGHT)
            elif not torch.equal(linear(X), wanted):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_of_fork_gets_a_sentence() -> None:
    linear = make().load(WEIGHT)
    ticket = linear.submit(X)
    ticket.wait()
    group = _core.LinearGroup([linear._core] * 2)
    few, out = torch.zeros(1, linear.in_features), torch.zeros(1, linear.out_features)
    # A thread of the parent is inside the group, which a child must not wait for.
    ended = threading.Event()

    def call_on() -> None:
        own = torch.zeros_like(out)
        while not ended.is_set():
            x = torch.randn(few.shape)
            group.forward(0, x, own)
            group.forward(1, x, own)

    busy = threading.Thread(target=call_on, daemon=True)
    busy.start()
    for body in (
        *[lambda: group.forward(0, few, out)] * 8,
        lambda: group.gave_up,
        lambda: linear(X),
        lambda: linear.submit(X),
        lambda: linear.load(WEIGHT),
        lambda: linear.rows([0]),
        lambda: ticket.done,
        ticket.wait,
    ):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                body()
                result = "fine"
            except BaseException as error:
                result = str(error)
            os.write(writer, result.encode())
            os._exit(0)
        os.close(writer)
        assert "make a new WorkerPool after fork()" in os.read(reader, 1000).decode()
        os.waitpid(child, 0)
        os.close(reader)
    ended.set()
    busy.join()


@pytest.mark.slow
def test_compiled_models_call_it(linear: ktk.Linear) -> None:
    model = torch.compile(lambda x: linear(x * 2) + 1, backend="eager")
    with torch.no_grad():
        assert torch.equal(model(X), linear(X * 2) + 1)
