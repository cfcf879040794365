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

# Environment below KTK_PEERS_DIR that has ktk installed.
ENVIRONMENT = "ktk"
HANDED_DOWN = "KTK_PEER_BACKENDS"

# What the runner calls the formats, to compare like with like and to estimate memory.
FORMATS = {
    "BF16": "bf16",
    "AMXINT8": "int8-row",
    "AMXINT4": "int4-g128",
    "RAWINT4": "int4-g32",
    "GPTQ_INT4": "int4-g128",
    "FP8": "fp8-b128",
    "FP8_PERCHANNEL": "fp8-row",
    "MXFP4": "mxfp4",
    "MXFP8": "mxfp8",
}

# Runs in the environment that has ktk. Prints {backend: [variants that run here, best first]}.
DISCOVER = """
import json, ktk
found = {}
for name, info in ktk.backends().items():
    try:
        found[name] = [v.name for v in ktk.load_backend(name).variants if v.runnable]
    except ktk.errors.BackendError:
        pass
print(json.dumps(found))
"""


def discover() -> dict[str, list[str]]:
    """Return the variants of each backend that can run here; without ktk, the known names."""
    handed_down = os.environ.get(HANDED_DOWN)
    if handed_down:
        return json.loads(handed_down)
    python = os.path.join(os.environ.get("KTK_PEERS_DIR", ""), ENVIRONMENT, "bin", "python")
    try:
        out = subprocess.run(
            [python, "-c", DISCOVER], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        found = json.loads(out.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        print(f"ktk's variants are not listed, {python} has no ktk: {detail}", file=sys.stderr)
        return {"BF16": [], "AMXINT8": []}
    os.environ[HANDED_DOWN] = json.dumps(found)
    return found


def make_peer(impls):
    """Return the class the runner drives, made from its own base class."""

    class Ktk(impls.Peer):
        backend = ""
        asked_variant = None

        def load(self, src):
            import ktk

            self.source = src
            self.pool = ktk.WorkerPool(impls.THREADS)
            backend = ktk.load_backend(self.backend)
            # Tensors of the format that is loaded from: the bf16 ones, quantised while loading.
            # Experts repeat the few unique ones of the source and get memory of their own.
            experts = [src.expert(e) for e in range(src.E)]
            gate, up, down = ([expert[i] for expert in experts] for i in range(3))
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
                )
                self._timed(lambda moe=moe: moe.load(gate, up, down))
                self.layers.append(moe)
            self.variant = self.layers[0].variant

        def run(self, layer, c):
            return self.layers[layer](c.x, c.ids, c.w)

        def expert_bytes(self):
            return self.layers[0].nbytes / self.source.E

        def dequant(self, e):
            import torch

            return [torch.from_numpy(matrix) for matrix in self.layers[0].unpack_expert(e)]

    return Ktk


def register(add, impls):
    """Add ktk/<backend>, the variant ktk chooses, and ktk/<backend>-<variant> for each."""
    peer = make_peer(impls)
    # The runner binds OpenMP's threads, which would leave the process a single CPU: ktk pins its
    # own threads to the CPUs of the mask it starts with.
    env = {"OMP_PROC_BIND": "false"}
    for backend, variants in discover().items():
        name, fmt = f"ktk/{backend.lower()}", FORMATS.get(backend, backend.lower())
        add(name, ENVIRONMENT, peer, fmt, env=env, backend=backend)
        for variant in variants:
            add(
                f"{name}-{variant}", ENVIRONMENT, peer, fmt, env=env,
                backend=backend, asked_variant=variant,
            )  # fmt: skip
