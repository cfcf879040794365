"""Lets a runner that times MoE implementations side by side time every ktk backend.

The runner calls `register(add, impls)` in its own process and again in the process of each
implementation; only the latter has ktk. Which backends and variants there are is therefore asked of
the environment that has it, once, and handed down through an environment variable.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

# Environment below KTK_PEERS_DIR that has ktk installed.
ENVIRONMENT = "ktk"
HANDED_DOWN = "KTK_PEER_BACKENDS"

# ktk/<name>: the backend, what the runner calls the format (to compare like with like and to
# estimate memory), how the weights are made, and which of the backend's formats they are stored as.
# "floats" go in as they are and are quantised while loading; everything else is made by the
# runner's own functions, so that rivals of a format compute with the very same values.
PEERS = {
    "bf16": ("BF16", "bf16", "floats", None),
    "bf16z": ("BF16Z", "bf16", "floats", None),
    "amxint8": ("AMXINT8", "int8-row", "floats", None),
    "amxint4": ("AMXINT4", "int4-g128", "floats", "g128"),
    "amxint4-g32": ("AMXINT4", "int4-g32", "floats", "g32"),
    "amxint4-row": ("AMXINT4", "int4-row", "floats", "row"),
    "amxint4-g32-zero": ("AMXINT4", "int4-g32", "floats", "g32-zero"),
    "rawint4": ("RAWINT4", "int4-g32", "int4", "g32"),
    "rawint4-g128": ("RAWINT4", "int4-g128", "int4", "g128"),
    "fp8": ("FP8", "fp8-b128", "fp8", "128x128"),
    "fp8_perchannel": ("FP8", "fp8-row", "fp8pc", "row"),
    "mxfp4": ("MXFP4", "mxfp4", "mxfp4", None),
    "mxfp8": ("FP8", "mxfp8", "mxfp8", "ue8m0"),
    **{
        name: ("LLAMAFILE", name, "ggml", name)
        for name in ("q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "iq4_xs")
    },
    # Names that are backends, too.
    "gguf-bf16": ("LLAMAFILE", "bf16", "floats", "bf16"),
    "gguf-mxfp4": ("LLAMAFILE", "mxfp4", "ggml", "mxfp4"),
}

# Runs in the environment that has ktk. Prints {backend: [variants that run here, default first]}.
DISCOVER = """
import json, ktk
found = {}
for name, info in ktk.backends().items():
    try:
        backend = ktk.load_backend(name)
        default = backend.core.default_variant()
        here = [v.name for v in backend.variants if v.runnable]
        found[name] = sorted(here, key=lambda variant: variant != default)
    except ktk.errors.BackendError:
        pass
print(json.dumps(found))
"""


def discover() -> dict[str, list[str]]:
    """Return the variants of each backend that can run here; without ktk, the known names."""
    handed_down = os.environ.get(HANDED_DOWN)
    if handed_down:
        known: dict[str, list[str]] = json.loads(handed_down)
        return known
    python = os.path.join(os.environ.get("KTK_PEERS_DIR", ""), ENVIRONMENT, "bin", "python")
    try:
        out = subprocess.run(
            [python, "-c", DISCOVER], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        found: dict[str, list[str]] = json.loads(out.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        print(f"ktk's variants are not listed, {python} has no ktk: {detail}", file=sys.stderr)
        return {backend: [] for backend, *_ in PEERS.values()}
    os.environ[HANDED_DOWN] = json.dumps(found)
    return found


def tensors(impls: Any, kind: str, stored: Any, weight: Any) -> tuple[Any, Any, Any]:
    """Make the arguments of one matrix: data, scale, zero."""
    if kind == "floats":
        return weight, None, None
    if kind == "int4":
        codes, scale = impls.q_int4(weight, stored.group_k)
        return impls.pack_int4_rows(codes), scale, None
    if kind == "fp8pc":
        codes, scale, _ = impls.q_fp8_row(weight)
        return codes, scale.view(-1, 1), None
    if kind == "ggml":  # encoded by the library of the runner's own ggml peers
        lib = impls.ggml_lib(os.path.join(impls.peers_dir(), "ggml", "libktk_ggml.so"))
        element = lib.ktk_type_by_name(stored.element.encode())
        return impls.ggml_quantize(lib, element, weight).view(len(weight), -1), None, None
    make = {"fp8": "q_fp8_block", "mxfp4": "q_mxfp4", "mxfp8": "q_mxfp8"}[kind]
    codes, scale, _ = getattr(impls, make)(weight)
    return codes, scale, None


def make_peer(impls: Any) -> Any:
    """Return the class the runner drives, made from its own base class."""

    class Ktk(impls.Peer):  # type: ignore[misc]
        backend = ""
        kind = "floats"
        stored: str | None = None
        asked_variant: str | None = None

        def load(self, src: Any) -> None:
            import ktk

            self.source = src
            self.pool = ktk.WorkerPool(impls.THREADS)
            backend = ktk.load_backend(self.backend)
            from ktk.bench.weights import choose_format

            stored = choose_format(backend, self.backend, self.stored)
            unique = src.each(lambda *w: [tensors(impls, self.kind, stored, m) for m in w])
            arguments = [self._arguments(expert, stored) for expert in unique]
            impls.mark_load_start()
            self.layers = []
            for _ in range(src.layers):
                moe = backend.moe(
                    num_experts=src.E,
                    num_experts_per_tok=src.k,
                    hidden_size=src.H,
                    intermediate_size=src.I,
                    variant=self.asked_variant,
                    pool=self.pool,
                    weight_format=stored,
                )
                self._timed(lambda moe=moe: self._load(moe, arguments))
                self.layers.append(moe)
            self.variant = self.layers[0].variant

        def _arguments(self, expert: Any, stored: Any) -> dict[str, Any]:
            """Return what load_expert takes; floats say themselves what they are."""
            found = {"given": None if self.kind == "floats" else stored}
            for name, arrays in zip(("gate", "up", "down"), expert, strict=True):
                for suffix, array in zip(("", "_scale", "_zero"), arrays, strict=True):
                    if array is not None:
                        found[name + suffix] = array
            return found

        def _load(self, moe: Any, arguments: list[dict[str, Any]]) -> None:
            # Experts repeat the few unique ones of the source and get memory of their own.
            for e in range(self.source.E):
                moe.load_expert(e, **arguments[e % len(arguments)])

        def run(self, layer: int, c: Any) -> Any:
            return self.layers[layer](c.x, c.ids, c.w)

        def expert_bytes(self) -> float:
            size: float = self.layers[0].nbytes / self.source.E
            return size

        def dequant(self, e: int) -> list[Any]:
            import torch

            return [torch.from_numpy(matrix) for matrix in self.layers[0].unpack_expert(e)]

    return Ktk


def register(add: Any, impls: Any) -> None:
    """Add ktk/<name>, with the variant ktk chooses, and ktk/<name>-<variant> for each.

    Names are those of PEERS, and the backend's own for one that is not there.
    """
    peer = make_peer(impls)
    # The runner binds OpenMP's threads, which would leave the process a single CPU: ktk pins its
    # own threads to the CPUs of the mask it starts with.
    env = {"OMP_PROC_BIND": "false"}
    found = discover()
    known = {backend for backend, *_ in PEERS.values()}
    others = {b.lower(): (b, b.lower(), "floats", None) for b in found if b not in known}
    for name, (backend, fmt, kind, stored) in {**PEERS, **others}.items():
        if backend not in found:
            continue
        keywords = {"env": env, "backend": backend, "kind": kind, "stored": stored}
        add(f"ktk/{name}", ENVIRONMENT, peer, fmt, **keywords)
        for variant in found[backend]:
            keywords["asked_variant"] = variant
            add(f"ktk/{name}-{variant}", ENVIRONMENT, peer, fmt, **keywords)
