"""The command of transformers with ktk switched on: python -m ktk.serving.transformers -- serve ...

Its server loads models by `from_pretrained` and has no option for what computes experts. So that
method gets the arguments here that a program of one's own would give it. The server also wants to
read the class of a model in its configuration, which GGUF files do not have.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from typing import Any

from ktk.status import INTERRUPTED, status_of
from ktk.system import let_openmp_sleep


def main() -> None:
    """Run the command of transformers with what stands behind `--`."""
    try:
        sys.exit(status_of(_run))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run() -> None:
    parser = argparse.ArgumentParser(prog="python -m ktk.serving.transformers")
    parser.add_argument("--backend", help="what computes the experts")
    parser.add_argument("--linears", help="what computes dense layers")
    parser.add_argument("--head", help="what computes the output head")
    parser.add_argument("--experts", help="folder that ktk convert made")
    parser.add_argument("--threads", type=int, help="threads that compute")
    parser.add_argument("arguments", nargs="+", help="of the command of transformers")
    given = parser.parse_args()
    let_openmp_sleep()
    if given.threads is not None:
        import torch

        from ktk.pool import set_default_threads

        set_default_threads(given.threads)
        torch.set_num_threads(given.threads)
    switch_on(given.backend, experts=given.experts, linears=given.linears, head=given.head)
    import click
    from transformers.cli.transformers import app

    try:
        # By itself it ends an interrupted server as a fault.
        code = app(given.arguments, prog_name="transformers", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as wrong:
        wrong.show()
        sys.exit(wrong.exit_code)


def switch_on(backend: str | None = None, **options: Any) -> None:
    """Let every model that is loaded from now on be computed by ktk, as `ktk run` does.

    Parameters
    ----------
    backend, **options
        Of `ktk.transformers.KtkConfig`.
    """
    from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from ktk.transformers import KtkConfig
    from ktk.transformers.gguf_metadata import read_once
    from ktk.transformers.linears import pack_bf16
    from ktk.transformers.load import load_whole

    stock = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    @functools.wraps(stock)
    def from_pretrained(
        cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
    ) -> Any:
        name = pretrained_model_name_or_path

        def load(path: str, **keywords: Any) -> Any:
            return stock(cls, path, *args, **keywords)

        if name is None or kwargs.get("quantization_config") is not None:
            return load(name, **kwargs)
        kwargs["quantization_config"] = given = KtkConfig(backend, **options)
        made = load_whole(load, os.fspath(name), **{**kwargs, "experts_implementation": "ktk"})
        model = made[0] if isinstance(made, tuple) else made
        pack_bf16(model, linears=given.linears is None, head=given.head is None)
        return made

    stock_config = AutoConfig.from_pretrained.__func__  # type: ignore[attr-defined]

    @functools.wraps(stock_config)
    def with_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with read_once():
            made = stock_config(cls, *args, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if config.architectures is None and known is not None:
            config.architectures = [known]
        return made

    stock_tokenizer = AutoTokenizer.from_pretrained.__func__  # type: ignore[attr-defined]

    @functools.wraps(stock_tokenizer)
    def with_reader(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with read_once():  # which hides what transformers reads wrong
            return stock_tokenizer(cls, *args, **kwargs)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment]
    AutoTokenizer.from_pretrained = classmethod(with_reader)  # type: ignore[assignment]
    AutoConfig.from_pretrained = classmethod(with_class)  # type: ignore[assignment]


if __name__ == "__main__":
    main()
