"""CPU kernels for the routed experts of Mixture-of-Experts models.

backend = ktk.load_backend("AMXINT8")
moe = backend.moe(num_experts=128, num_experts_per_tok=8, hidden_size=2048,
                  intermediate_size=768)
moe.load(gate, up, down)
y = moe(hidden, topk_ids, topk_weights)
"""

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

# In a checkout, `python -m ktk...` finds this folder first; the compiled modules are where ktk was
# installed.
__path__ = extend_path(__path__, __name__)

from ktk._core import Format, WorkerPool
from ktk.backend import Backend, BackendInfo
from ktk.config import MoEConfig
from ktk.errors import (
    BackendConflict,
    BackendError,
    BackendImportError,
    BackendIncompatible,
    BackendNotFound,
    BackendUnsupported,
    CheckpointError,
    CheckpointFormatError,
    CheckpointTooLarge,
    SettingError,
)
from ktk.linear import Linear
from ktk.lora import Lora
from ktk.model import Model
from ktk.moe import MoE
from ktk.pool import default_pool
from ktk.registry import backends, load_backend
from ktk.ticket import Ticket

if TYPE_CHECKING:
    from ktk.ktmoe import KTMoEWrapper, generate_gpu_experts_masks
    from ktk.loading.collector import ExpertCollector

    __version__: str

__all__ = [
    "Backend",
    "BackendConflict",
    "BackendError",
    "BackendImportError",
    "BackendIncompatible",
    "BackendInfo",
    "BackendNotFound",
    "BackendUnsupported",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointTooLarge",
    "ExpertCollector",
    "Format",
    "KTMoEWrapper",
    "Linear",
    "Lora",
    "MoE",
    "MoEConfig",
    "Model",
    "SettingError",
    "Ticket",
    "WorkerPool",
    "backends",
    "default_pool",
    "generate_gpu_experts_masks",
    "get_include",
    "load_backend",
]


def get_include() -> str:
    """Return the directory of ``ktk/abi.h`` and ``gemm/driver.h``, for authors of backends."""
    package = Path(__file__).parent
    installed = package / "include"
    # An editable install runs from the source tree: backends' headers are linked there.
    return str(installed if installed.is_dir() else package.parent / "native" / "include")


# These need torch, which takes a second and 200 MB, and are imported when somebody asks for them.
_LAZY = {
    "ExpertCollector": "ktk.loading.collector",
    "KTMoEWrapper": "ktk.ktmoe",
    "generate_gpu_experts_masks": "ktk.ktmoe",
}


if not TYPE_CHECKING:  # or any name at all would be one of ktk to a type checker

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            value = version(__name__)
        elif name in _LAZY:
            value = getattr(import_module(_LAZY[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
