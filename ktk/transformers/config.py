"""`KtkConfig`: what `from_pretrained` is to do about experts."""

from __future__ import annotations

import os

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "ktk"


@register_quantization_config(METHOD)
class KtkConfig(QuantizationConfigMixin):
    """Which backend computes a model's experts, and where their weights are.

    Parameters
    ----------
    backend : str, optional
        Name of a backend, or of a format. By default what the files hold decides, as in
        :func:`ktk.loading.default_backend`.
    experts : path, optional
        Where the experts are, if not beside the model's other weights: a folder that `ktk convert`
        wrote, say.
    """

    # Options for dense layers and the output head go here.
    def __init__(
        self,
        backend: str | None = None,
        *,
        experts: str | os.PathLike[str] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        if backend is not None and not isinstance(backend, str):
            raise TypeError(f"backend must be the name of a backend or None, got {backend!r}")
        if quant_method != METHOD:
            raise ValueError(f"quant_method must be {METHOD!r}, got {quant_method!r}")
        self.quant_method = METHOD  # type: ignore[assignment]  # a name that is registered will do
        self.backend = backend
        self.experts = None if experts is None else os.fspath(experts)
