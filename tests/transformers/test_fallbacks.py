"""Where a way is closed there is another with right numbers, or one sentence."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from tiny import FAMILIES
from transformers import modeling_gguf_pytorch_utils, modeling_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

import ktk
import ktk.transformers
from ktk.transformers import hook, modules
from ktk.transformers.layout import FLAGS, Layout, is_experts
from ktk.transformers.packed import packed_modules


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "_said", set())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["qwen3-moe"].save(tmp_path_factory.mktemp("model"))


def test_what_is_hooked_has_not_moved() -> None:
    """If this fails, transformers changed what ktk.transformers.hook and quantizer stand on."""
    stock = inspect.unwrap(getattr(modeling_utils, hook.HOOKED))
    assert tuple(inspect.signature(stock).parameters) == hook.PARAMETERS
    assert hook.install()
    called = inspect.getsource(modeling_utils.PreTrainedModel.from_pretrained)
    assert f"{hook.HOOKED}(" in called
    assert "hf_quantizer.preprocess_model(" in called
    assert "hf_quantizer.postprocess_model(" in called
    assert "checkpoint_files=checkpoint_files" in called
    saved = inspect.getsource(modeling_utils.PreTrainedModel.save_pretrained)
    assert "hf_quantizer.get_state_dict_and_metadata(self)" in saved
    for name in ("preprocess_model", "postprocess_model", "get_state_dict_and_metadata"):
        assert hasattr(HfQuantizer, name)
    source = inspect.getsource(use_experts_implementation)
    assert all(f"self.{flag} = {flag}" in source for flag in FLAGS)


def test_names_of_transformers_that_nobody_promised() -> None:
    """If this fails, look at where ktk/transformers uses the name."""
    model = modeling_utils.PreTrainedModel
    initialize = inspect.getsource(model._initialize_weights)
    assert 'getattr(module, "_is_hf_initialized", False)' in initialize
    assert "_keys_to_ignore_on_load_unexpected" in inspect.getsource(
        model._adjust_missing_and_unexpected_keys
    )
    assert "_hf_peft_config_loaded" in inspect.getsource(model.save_pretrained)
    assert "_experts_implementation_internal" in inspect.getsource(model.set_experts_implementation)
    assert "_apply_gate" in inspect.getsource(use_experts_implementation)
    experts = [one for one in FAMILIES["qwen3-moe"].make().modules() if is_experts(one)]
    assert "__wrapped__" in vars(type(experts[0]).forward)
    mapping = inspect.signature(modeling_gguf_pytorch_utils.get_gguf_hf_weights_map)
    assert list(mapping.parameters)[:2] == ["hf_model", "processor"]
    process = inspect.signature(modeling_gguf_pytorch_utils.TensorProcessor.process)
    assert list(process.parameters) == ["self", "weights", "name", "kwargs"]
    for name in ("read_header", "get_state_dict", "update_dtype"):
        assert hasattr(GgufHfQuantizer, name)


@pytest.fixture
def unhooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers, as if the function that is hooked had another signature."""
    stock = inspect.unwrap(getattr(modeling_utils, hook.HOOKED))

    def moved(
        config: Any, quantization_config: Any, *rest: Any, other: Any = None, **more: Any
    ) -> Any:
        return stock(config, quantization_config, *rest, **more)

    monkeypatch.setattr(modeling_utils, hook.HOOKED, moved)


@pytest.mark.usefixtures("unhooked")
def test_without_the_hook_experts_are_packed_at_the_first_call(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = tiny.tokens()
    with caplog.at_level(logging.WARNING):
        assert not hook.install()
        model = tiny.load(folder, experts_implementation="ktk")
        assert not packed_modules(model)
        found = tiny.logits(model, ids)
    assert len(packed_modules(model)) == 2
    said = [record.message for record in caplog.records if record.name == "ktk.transformers"]
    assert len(said) == 2
    assert "does not know" in said[0]
    assert "packed for BF16 at the first call" in said[1]
    # And the configuration alone, which is public, still loads from files.
    loaded = tiny.load(folder, quantization_config=ktk.transformers.KtkConfig())
    assert torch.equal(tiny.logits(loaded, ids), found)


def test_functions_that_ktk_has_not_are_left_to_transformers(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    config.hidden_act = "mish"
    with caplog.at_level(logging.WARNING):
        model = tiny.load(folder, config=config, experts_implementation="ktk")
        found = tiny.logits(model, tiny.tokens())
    assert not packed_modules(model)
    stock = tiny.load(folder, config=config, experts_implementation="grouped_mm")
    assert torch.equal(found, tiny.logits(stock, tiny.tokens()))
    [said] = [record.message for record in caplog.records if record.name == "ktk.transformers"]
    assert "Qwen3MoeExperts, whose function of gate and up ktk does not have" in said
    with pytest.raises(ValueError, match="no experts that ktk can compute"):
        ktk.transformers.pack(tiny.load(folder, config=config))


def test_models_that_keep_experts_in_another_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Llama-4 multiplies what goes into an expert; transformers computes it as ever."""
    kind = transformers.Llama4ForCausalLM
    folder = tiny.Family(kind.__name__, {"moe_layers": [0, 1], "intermediate_size_mlp": 64}).save(
        tmp_path
    )
    with caplog.at_level(logging.WARNING):
        model = kind.from_pretrained(folder, experts_implementation="ktk")
    assert not packed_modules(model)
    stock = kind.from_pretrained(folder)
    assert torch.equal(tiny.logits(model, tiny.tokens()), tiny.logits(stock, tiny.tokens()))
    assert any("has no experts that ktk can compute" in record.message for record in caplog.records)


def test_files_that_ktk_does_not_read_are_read_by_transformers(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.load(folder)
    wanted = tiny.logits(tiny.load(folder, experts_implementation="ktk"), tiny.tokens())
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING):
        loaded = tiny.load(tmp_path, experts_implementation="ktk")
    assert len(packed_modules(loaded)) == 2
    assert torch.equal(tiny.logits(loaded, tiny.tokens()), wanted)
    assert any("transformers loads the experts" in record.message for record in caplog.records)


def test_two_models_in_a_folder_are_not_confused(folder: Path, tmp_path: Path) -> None:
    other = tiny.load(folder)
    with torch.no_grad():
        for one in other.parameters():
            one.mul_(0.5)
    other.save_pretrained(tmp_path, variant="half")
    tiny.load(folder).save_pretrained(tmp_path)
    model = tiny.load(tmp_path, variant="half", experts_implementation="ktk")
    ktk.transformers.pack(other)
    assert torch.equal(tiny.logits(model, tiny.tokens()), tiny.logits(other, tiny.tokens()))


def test_names_and_folders_that_are_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ktk.BackendNotFound, match="no backend 'AMXINT9'"):
        ktk.transformers.load(folder, backend="AMXINT9")
    with pytest.raises(ktk.CheckpointError, match="there is no such folder or file"):
        ktk.transformers.load(tmp_path / "none")
    with pytest.raises(TypeError, match="backend must be the name"):
        ktk.transformers.KtkConfig(3)  # type: ignore[arg-type]
    with pytest.raises(ktk.CheckpointError, match="none is missing"):
        ktk.transformers.load(folder, experts=tmp_path / "none")


def test_a_missing_extra_is_one_sentence() -> None:
    code = "import sys; sys.modules['transformers'] = None\nimport ktk.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert last == 'ImportError: ktk.transformers needs transformers: pip install "ktk[run]"'


@pytest.mark.slow
def test_importing_ktk_imports_no_transformers() -> None:
    code = "import sys, ktk, ktk.hosts; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_stock_experts_are_still_there_for_others() -> None:
    assert {"ktk", "grouped_mm"} <= set(ALL_EXPERTS_FUNCTIONS.keys())
    model = FAMILIES["gpt-oss"].make()
    [first, *_] = [module for module in model.modules() if is_experts(module)]
    layout = Layout.of(first)
    assert layout == Layout(transposed=True, interleaved=True, has_bias=True)
