"""In the place of kt-kernel's extension module: engines ask what it has, and do without."""

from typing import NoReturn


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"kt_kernel_ext has no {name!r}: this kt_kernel is ktk, whose layers are KTMoEWrapper's"
    )
