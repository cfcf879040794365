"""`KtkConfig`: what `from_pretrained` is to do about experts, dense layers and the output head."""

from __future__ import annotations

import os

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "ktk"


@register_quantization_config(METHOD)
class KtkConfig(QuantizationConfigMixin):
    """Which backends compute a model, and where the weights of its experts are.

    Parameters
    ----------
    backend : str, optional
        Name of a backend, or of a format. By default what the files hold decides, as in
        :func:`ktk.loading.default_backend`.
    experts : path, optional
        Where the experts are, if not beside the model's other weights: a folder that `ktk convert`
        wrote, say.
    linears : str, optional
        Name of the backend of dense layers: attention, dense MLPs, shared experts; not routers. By
        default what is stored as floats stays transformers', and codes and blocks of GGUF files are
        computed as they are; beside a `device_map` that names a GPU they go there, as floats or
        by transformers' own kernels.
    head : str, optional
        Name of the backend of the output head; an embedding that is tied to it is read from there.
        By default as `linears`' default.
    """

    def __init__(
        self,
        backend: str | None = None,
        *,
        experts: str | os.PathLike[str] | None = None,
        linears: str | None = None,
        head: str | None = None,
        quant_method: str = METHOD,
    ) -> None:
        for option, name in (("backend", backend), ("linears", linears), ("head", head)):
            if name is not None and not isinstance(name, str):
                raise TypeError(f"{option} must be the name of a backend or None, got {name!r}")
        if quant_method != METHOD:
            raise ValueError(f"quant_method must be {METHOD!r}, got {quant_method!r}")
        self.quant_method = METHOD  # type: ignore[assignment]  # a name that is registered will do
        self.backend = backend
        self.linears = linears
        self.head = head
        self.experts = None if experts is None else os.fspath(experts)
