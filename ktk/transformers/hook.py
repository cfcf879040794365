"""Lets `experts_implementation="ktk"` alone load experts from files.

Transformers asks one function for the quantizer of a model, and gives no way to add to its answer.
That function is replaced by one that calls it. Where it has moved, experts are packed at the first
call, with right results and more memory.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import modeling_utils
from transformers.utils.hub import cached_file

from ktk.transformers.codes import all_known, on_cpu
from ktk.transformers.config import METHOD, KtkConfig
from ktk.transformers.files import only_experts_in_codes
from ktk.transformers.modules import say_once
from ktk.transformers.quantizer import with_experts
from ktk.transformers.unmarked import mark

HOOKED = "get_hf_quantizer"
PARAMETERS = (
    *("config", "quantization_config", "device_map", "weights_only", "user_agent", "gguf_file"),
)


def install() -> bool:
    """Replace the function of transformers, once; False if it is not the one that is known."""
    stock = getattr(modeling_utils, HOOKED, None)
    if getattr(stock, "ktk", False):
        return True
    if stock is None or tuple(inspect.signature(stock).parameters) != PARAMETERS:
        say_once(
            "this version of transformers loads models in a way that ktk does not know: give "
            "quantization_config=KtkConfig() beside experts_implementation, or experts are packed "
            "at the first call, which takes more memory"
        )
        return False
    setattr(modeling_utils, HOOKED, _with_experts(stock))
    return True


def _with_experts(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_hf_quantizer(
        config: Any, quantization_config: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, Any]:
        mark()  # the class of the model is imported, and its modules are not made yet
        mine = quantization_config if isinstance(quantization_config, KtkConfig) else None
        if mine is None and not _asked_for(config):
            answer: tuple[Any, Any, Any] = stock(config, quantization_config, *args, **kwargs)
            return answer
        if mine is not None:
            quantization_config = None
        place = kwargs["device_map"] if "device_map" in kwargs else args[0]
        in_codes = kwargs.get("gguf_file") is None and _ktk_reads_all_codes(config, on_cpu(place))
        if in_codes:
            for one in (config, config.get_text_config(decoder=True)):
                if hasattr(one, "quantization_config"):
                    del one.quantization_config
        quantizer, config, device_map = stock(config, quantization_config, *args, **kwargs)
        quantizer = with_experts(quantizer, mine or KtkConfig())
        quantizer.in_codes = in_codes
        return quantizer, config, device_map

    get_hf_quantizer.ktk = True  # type: ignore[attr-defined]
    return get_hf_quantizer


def _asked_for(config: Any) -> bool:
    text = config.get_text_config(decoder=True)
    return METHOD in (config._experts_implementation, text._experts_implementation)


def _ktk_reads_all_codes(config: Any, cpu: bool) -> bool:
    """Whether a checkpoint is quantised, and all of its matrices in codes are such as ktk reads.

    These are experts, and on CPUs dense layers, too.
    Its quantizer, and what that needs installed, is not needed then.
    """
    if not config.name_or_path or getattr(config, "quantization_config", None) is None:
        return False
    revision = getattr(config, "_commit_hash", None)
    try:
        path = cached_file(
            config.name_or_path, "config.json", local_files_only=True, revision=revision
        )
    except OSError:
        return False  # found out when transformers has found the files
    folder = Path(str(path)).parent
    return only_experts_in_codes(folder) or (cpu and all_known(folder))
