"""kt-kernel's package, as ktk: what engines import of it. `ktk compat` says how it is reached."""

from kt_kernel import kt_kernel_ext
from ktk import KTMoEWrapper, generate_gpu_experts_masks
from ktk.compat import kt_version
from ktk.compat.cpu import variant

__version__ = kt_version()
__cpu_variant__ = variant()

__all__ = [
    "KTMoEWrapper",
    "__cpu_variant__",
    "__version__",
    "generate_gpu_experts_masks",
    "kt_kernel_ext",
]
