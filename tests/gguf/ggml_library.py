"""ggml itself, through ctypes: what encodes its types, and what multiplies with them.

The wheel of pywhispercpp has ggml's shared libraries beside the package. None of its Python is
imported.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

_F32, _I32 = 0, 26  # of ggml_type
_GRAPH_BYTES = 16 << 20  # more than a graph of three tensors needs


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _TypeTraits(ctypes.Structure):
    _fields_ = (
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)),
        ("from_float_ref", c_void_p),
    )


_BASE = {
    "ggml_get_type_traits": (ctypes.POINTER(_TypeTraits), [c_int]),
    "ggml_quantize_chunk": (
        c_size_t,
        [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p],
    ),
    "ggml_quantize_requires_imatrix": (c_bool, [c_int]),
    "ggml_init": (c_void_p, [_InitParams]),
    "ggml_free": (None, [c_void_p]),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_new_tensor_3d": (c_void_p, [c_void_p, c_int, c_int64, c_int64, c_int64]),
    "ggml_mul_mat_id": (c_void_p, [c_void_p] * 4),
    "ggml_get_data": (c_void_p, [c_void_p]),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
}
_CPU = {
    "ggml_cpu_init": (None, []),
    "ggml_graph_compute_with_ctx": (c_int, [c_void_p, c_void_p, c_int]),
}


def folder() -> Path | None:
    """Return where the libraries are, if they are installed."""
    spec = importlib.util.find_spec("pywhispercpp")
    if spec is None or not spec.submodule_search_locations:
        return None
    libraries = Path(spec.submodule_search_locations[0]).parent / "pywhispercpp.libs"
    return libraries if any(libraries.glob("libggml-cpu*")) else None


@functools.cache
def _library(stem: str) -> Any:
    where = folder()
    assert where is not None
    library = ctypes.CDLL(str(next(where.glob(f"{stem}*.so*"))))
    for name, (result, arguments) in (_CPU if stem == "libggml-cpu" else _BASE).items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def encode(values: np.ndarray, kind: Type) -> np.ndarray:
    """Quantise along the last axis; where importance is a must, columns are alike."""
    base = _library("libggml-base")
    values = np.ascontiguousarray(values, np.float32)
    rows = np.zeros(gguf.quants.quant_shape_to_byte_shape(values.shape, kind), np.uint8)
    count, k = values.size // values.shape[-1], values.shape[-1]
    importance = np.ones(k, np.float32)
    weighted = importance.ctypes.data if base.ggml_quantize_requires_imatrix(kind) else None
    done = base.ggml_quantize_chunk(
        kind, values.ctypes.data, rows.ctypes.data, 0, count, k, weighted
    )
    assert done == rows.nbytes
    return rows


def decode(rows: np.ndarray, kind: Type) -> np.ndarray:
    """Return the values in f32."""
    values = np.empty(gguf.quants.quant_shape_from_byte_shape(rows.shape, kind), np.float32)
    traits = _library("libggml-base").ggml_get_type_traits(kind).contents
    traits.to_float(rows.ctypes.data, values.ctypes.data, values.size)
    return values


def expert_products(rows: np.ndarray, kind: Type, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Multiply tokens with matrices of experts, as ggml's CPU backend does for MoE layers.

    Parameters
    ----------
    rows : uint8 [experts, n, bytes of a row]
    x : f32 [tokens, k]
    ids : int32 [tokens, chosen]

    Returns
    -------
    f32 [tokens, chosen, n]
    """
    base, cpu = _library("libggml-base"), _library("libggml-cpu")
    cpu.ggml_cpu_init()
    (experts, n, _), (tokens, k), chosen = rows.shape, x.shape, ids.shape[1]
    # The tensors, the result, and what the graph keeps x in.
    nbytes = rows.nbytes + x.nbytes + ids.nbytes + 4 * tokens * chosen * (n + k)
    context = base.ggml_init(_InitParams(nbytes + _GRAPH_BYTES, None, False))
    try:
        weight = base.ggml_new_tensor_3d(context, kind, k, n, experts)
        hidden = base.ggml_new_tensor_3d(context, _F32, k, 1, tokens)
        which = base.ggml_new_tensor_2d(context, _I32, chosen, tokens)
        inputs = ((weight, rows), (hidden, x), (which, ids))
        for tensor, array in inputs:
            array = np.ascontiguousarray(array)
            ctypes.memmove(base.ggml_get_data(tensor), array.ctypes.data, array.nbytes)
        product = base.ggml_mul_mat_id(context, weight, hidden, which)
        graph = base.ggml_new_graph(context)
        base.ggml_build_forward_expand(graph, product)
        assert cpu.ggml_graph_compute_with_ctx(context, graph, 1) == 0
        data = ctypes.cast(base.ggml_get_data(product), ctypes.POINTER(c_float))
        return np.ctypeslib.as_array(data, (tokens, chosen, n)).copy()
    finally:
        base.ggml_free(context)
