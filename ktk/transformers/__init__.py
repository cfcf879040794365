"""Experts of transformers' models on ktk's kernels.

import ktk.transformers
model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="ktk")
"""

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError('ktk.transformers needs transformers: pip install "ktk[run]"') from error

from ktk.transformers import forward as _forward  # noqa: F401
from ktk.transformers.config import KtkConfig
from ktk.transformers.hook import install
from ktk.transformers.load import load, load_tokenizer
from ktk.transformers.pack import pack

__all__ = ["KtkConfig", "load", "load_tokenizer", "pack"]

install()
