"""What all hosts share: packages that let an inference engine, or a library, compute with ktk.

`op` is the operator "ktk::moe" that their models call, `adapters` is that for tokens which choose
adapters, `linear` are those of dense layers, and `train` those of backward passes; `plain` says
when none is needed. `pool` divides CPUs among worker processes.
"""

from ktk.hosts import train as _train  # noqa: F401
from ktk.hosts.op import OpLayer

__all__ = ["OpLayer"]
