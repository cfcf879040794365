"""What all hosts share: packages that let an inference engine, or a library, compute with ktk.

`op` is the operator "ktk::moe" that their models call, `linear` are those of dense layers.
"""

from ktk.hosts.op import OpLayer

__all__ = ["OpLayer"]
