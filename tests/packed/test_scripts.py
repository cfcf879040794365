"""The scripts with kt-kernel's flags call the same code, and say what a flag does not do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import checkpoints as made
import pytest
import torch
import typer
from checkpoints import BLOCKS

import ktk
import ktk.cli.convert
from ktk.conversion import convert

TOOLS = Path(__file__).parents[2] / "tools"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("method", "backend"),
    [("int4", "AMXINT4"), ("int8", "AMXINT8"), ("moe_int4", "AMXINT4")],
)
def test_cpu_weights_are_those_of_convert(method: str, backend: str, tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    script("convert_cpu_weights").main(
        ["-i", str(source), "-o", str(tmp_path / "packed"), "--quant-method", method]
    )
    convert(source, tmp_path / "expected", backend=backend)
    assert made.contents(tmp_path / "packed") == made.contents(tmp_path / "expected")


def test_platforms_own_int8_is_an_alias(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    script("convert_cpu_weights").main(
        ["-i", str(source), "-o", str(tmp_path / "packed"), "--quant-method", "moe_int8"]
    )
    moe = ktk.MoE.from_checkpoint(tmp_path / "packed", 0)
    assert moe.backend.name == ktk.load_backend("MOE_INT8").name


def test_flags_without_meaning_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = made.write(tmp_path / "source", BLOCKS, layers=(0, 1))
    arguments = ["-i", str(source), "-o", str(tmp_path / "packed"), "--quant-method", "int8"]
    flags = ["--threadpool-count", "2", "--gpu", "--no-merge-safetensor", "--profile"]
    flags += ["--save-backward-weights"]
    main = script("convert_cpu_weights").main
    main([*arguments, "--cpuinfer-threads", "2", "--input-type", "bf16", *flags])
    said = capsys.readouterr().err
    for flag in [one for one in flags if one.startswith("--")]:
        assert f"{flag} has no effect" in said
    assert "are stored as e4m3 with f32 scales per 128 x 128" in said
    assert "--cpuinfer-threads" not in said

    (tmp_path / "packed" / "layer-00001.safetensors").unlink()
    main([*arguments, "--input-type", "fp8", "--resume-layer", "1"])
    said = capsys.readouterr().err
    assert "--resume-layer goes on" in said
    assert "--input-type" not in said
    assert "layers 0 are there already" in said


def test_a_used_folder_is_gone_on_with_by_the_flag_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = made.write(tmp_path / "source")
    arguments = ["-i", str(source), "-o", str(tmp_path / "packed")]
    main = script("convert_cpu_weights").main
    main(arguments)
    with pytest.raises(SystemExit, match="go on with it by --resume, or"):
        main(arguments)
    main([*arguments, "--resume"])
    assert "are there already" in capsys.readouterr().err


def test_what_stops_a_conversion_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made.write(tmp_path / "source")
    arguments = ["-i", str(source), "-o", str(tmp_path / "packed")]
    main = script("convert_cpu_weights").main
    monkeypatch.setenv("KTK_ISA", "bogus")
    with pytest.raises(SystemExit, match="KTK_ISA is 'bogus'"):
        main(arguments)
    monkeypatch.delenv("KTK_ISA")

    def interrupted(*_: object, **__: object) -> None:
        raise typer.Exit(130)

    monkeypatch.setattr(ktk.cli.convert, "run_convert", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 130


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    main = script("convert_cpu_weights").main
    with pytest.raises(SystemExit, match=r"nowhere is missing: there is no such folder"):
        main(["-i", str(tmp_path / "nowhere"), "-o", str(tmp_path / "out")])


# --- for the GPU --------------------------------------------------------------------------------


def test_without_llmcompressor_the_way_to_get_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llmcompressor", None)
    with pytest.raises(SystemExit, match=r"llmcompressor is not installed.*ktk\[gpu-weights\]"):
        script("convert_gpu_weights").main(["--model_id", "m", "--output_dir", "o"])


class Recorded:
    """Stands for a class or function of a library that is not installed, and keeps its calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *_: Any, **options: Any) -> Recorded:
        self.calls.append(options)
        return self


@pytest.mark.parametrize(
    ("flags", "modifier", "options"),
    [
        ([], "GPTQModifier", {"scheme": "W8A16", "dampening_frac": 0.1}),
        (
            ["--quant_type", "W4A16", "--dampening_frac", "0.05"],
            "GPTQModifier",
            {"scheme": "W4A16"},
        ),
        (["--quant_method", "RTN"], "QuantizationModifier", {"scheme": "W8A16"}),
    ],
)
def test_the_recipe_follows_the_flags(
    flags: list[str], modifier: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = ModuleType("llmcompressor.modifiers.quantization")
    library.GPTQModifier, library.QuantizationModifier = Recorded(), Recorded()
    for name in ("llmcompressor", "llmcompressor.modifiers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    tool = script("convert_gpu_weights")
    flags = [*flags, "--ignore_patterns", "re:.*self_attn.*"]
    tool.recipe(tool.parse(["--model_id", "m", "--output_dir", "o", *flags]))
    [made_with] = getattr(library, modifier).calls
    assert made_with["targets"] == "Linear"
    assert options.items() <= made_with.items()
    assert made_with["ignore"] == [*tool.IGNORED, "re:.*self_attn.*"]


def test_a_dtype_that_torch_has_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    tool = script("convert_gpu_weights")
    flags = ["--model_id", "m", "--output_dir", "o", "--torch_dtype"]
    with pytest.raises(SystemExit):
        tool.parse([*flags, "fp16"])
    assert "argument --torch_dtype: invalid choice: 'fp16'" in capsys.readouterr().err
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in tool.DTYPES)
    assert tool.parse([*flags, "float16"]).torch_dtype == "float16"


@pytest.mark.parametrize(
    ("flags", "gpus", "expected"),
    [
        ([], 0, {"device_map": "cpu"}),
        (["--force_cpu"], 2, {"device_map": "cpu"}),
        ([], 2, {"device_map": "auto"}),
        (
            ["--max_gpu_memory", "20GiB", "--max_cpu_memory", "1.5GB"],
            2,
            {"device_map": "auto", "max_memory": {0: "20GiB", 1: "20GiB", "cpu": "1.5GB"}},
        ),
    ],
)
def test_the_model_goes_where_the_flags_say(
    flags: list[str], gpus: int, expected: dict[str, Any]
) -> None:
    tool = script("convert_gpu_weights")
    options = tool.parse(["--model_id", "m", "--output_dir", "o", *flags])
    assert tool.placement(options, gpus) == expected


def test_less_than_one_thread_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-i", "in", "-o", "out", "--cpuinfer-threads", "0"]
    with pytest.raises(SystemExit):
        script("convert_cpu_weights").main(flags)
    assert "--cpuinfer-threads: expected at least 1, got 0" in capsys.readouterr().err
