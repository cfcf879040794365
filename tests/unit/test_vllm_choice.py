"""When ktk takes a model of vLLM's over, and which CPUs its workers get; vLLM is not needed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from schemes import AWQ_CONFIG, FP8_CONFIG, GPTQ_CONFIG, SCHEMES, ct, sources

import ktk.vllm
from ktk.checkpoint.quantization import read_quantization
from ktk.checkpoint.safetensors.tensors import read_tensors
from ktk.hosts import stored
from ktk.hosts.choice import Mode
from ktk.hosts.pool import bound_cpus, share
from ktk.quantize import dequantize
from ktk.vllm import choice
from ktk.vllm.activation import activation_of

INT4 = ct(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KTK_VLLM", "KTK_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


def amx(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(choice, "cpu_flags", lambda: {"avx512f", *["amx_tile"] * there})


def test_it_takes_what_vllm_has_no_kernels_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choice.say_once.said.clear()
    amx(monkeypatch, False)
    with caplog.at_level("INFO", logger="vllm.ktk"):
        for config in (FP8_CONFIG, GPTQ_CONFIG, AWQ_CONFIG, INT4, {"quant_method": "mxfp4"}):
            assert choice.takes_over(config, None, True)
            assert not choice.takes_over(config, None, False)
            assert not choice.takes_over(config, "moe_wna16", True)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0].startswith("ktk computes what this model stores as fp8: vLLM has no kernels")
    assert len(lines) == len(set(lines))
    amx(monkeypatch, True)
    assert not choice.takes_over(FP8_CONFIG, None, True)
    assert choice.takes_over(FP8_CONFIG, "ktk", True)


def test_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    amx(monkeypatch, True)
    monkeypatch.setenv("KTK_BACKEND", "AMXINT8")
    assert choice.mode() is Mode.ALWAYS
    assert choice.takes_over(FP8_CONFIG, None, True)
    monkeypatch.setenv("KTK_VLLM", "0")
    assert choice.mode() is Mode.NEVER
    amx(monkeypatch, False)
    assert not choice.takes_over(FP8_CONFIG, None, True)
    monkeypatch.setenv("KTK_VLLM", "1")
    assert choice.takes_over(FP8_CONFIG, "fp8", False)
    assert not choice.takes_over({"quant_method": "hqq"}, None, True)
    monkeypatch.setenv("KTK_VLLM", "yes")
    with pytest.raises(ValueError, match="KTK_VLLM must be 0 or 1, got 'yes'"):
        choice.mode()


ROLES = {
    "fp8 by blocks": ("weight", "weight_scale_inv"),
    "fp8 by rows": ("weight", "weight_scale"),
    "mxfp8": ("weight", "weight_scale_inv"),
    "int8 by rows": ("weight", "weight_scale"),
    "int4": ("weight_packed", "weight_scale", "weight_shape"),
    "int4 of 256": ("weight_packed", "weight_scale", "weight_shape"),
    "int4 by rows": ("weight_packed", "weight_scale", "weight_shape"),
    "nvfp4": ("weight", "weight_scale", "weight_scale_2"),
    "nvfp4 by compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "gptq": ("qweight", "scales", "qzeros"),
    "gptq, symmetric": ("qweight", "scales", "qzeros"),
}


@pytest.mark.parametrize("name", ROLES)
def test_configs_say_which_tensors_come(name: str) -> None:
    fmt, make, config = SCHEMES[name]
    roles = stored.roles_of(config)
    assert roles == ROLES[name]
    made = make(next(iter(sources(fmt).values())))
    assert {suffix.lstrip(".") for suffix in made} - {"g_idx"} == set(roles)


def test_other_configs() -> None:
    assert stored.roles_of(None) == ("weight",)
    assert stored.roles_of({"quant_method": "mxfp4"}) == ("blocks", "scales")
    assert stored.roles_of(AWQ_CONFIG) == ("qweight", "scales", "qzeros")
    asymmetric = ct(num_bits=4, type="int", group_size=32, symmetric=False)
    assert stored.roles_of(asymmetric) == (*ROLES["int4"], "weight_zero_point")
    mxfp4 = ct(num_bits=4, type="float", group_size=32)
    assert stored.roles_of(mxfp4) == ("weight_packed", "weight_scale")
    # What sorts columns and puts them back, and what sorts those of one group, leaves no order.
    for order in (None, False, "weight", "static"):
        assert stored.roles_of(ct(num_bits=4, type="int", actorder=order)) == ROLES["int4"]
    all_columns = {**GPTQ_CONFIG, "desc_act": True, "group_size": -1}
    assert stored.roles_of(all_columns) == ("qweight", "scales", "qzeros")


N, K, G = 48, 64, 32
CODES = torch.arange(N * K, dtype=torch.int64).reshape(N, K) * 7 % 256
ZEROS = torch.arange(N * 2, dtype=torch.int64).reshape(N, 2) % 9 + 124
SCALE = torch.full((N, 2), 0.25)
SIZE = torch.tensor([N, K])


def words(codes: torch.Tensor) -> torch.Tensor:
    """Pack four codes of 8 bits along the rows of [n, k] to an int32."""
    return codes.to(torch.uint8).contiguous().view(torch.int32)


IN_WORDS = {"weight_packed": words(CODES), "weight_scale": SCALE, "weight_shape": SIZE}
IN_BYTES = {"weight": (CODES - 128).to(torch.int8), "weight_scale": SCALE}


@pytest.mark.parametrize(
    ("form", "symmetric", "tensors"),
    [
        ("pack-quantized", True, IN_WORDS),
        ("pack-quantized", False, IN_WORDS | {"weight_zero_point": words(ZEROS.T).T.contiguous()}),
        ("int-quantized", True, IN_BYTES),
        ("int-quantized", False, IN_BYTES | {"weight_zero_point": (ZEROS - 128).to(torch.int8)}),
    ],
)
@pytest.mark.parametrize("of_group", [True, False])
def test_compressed_integers_of_8_bits_have_the_tensors_of_their_format(
    form: str, symmetric: bool, tensors: dict[str, torch.Tensor], of_group: bool
) -> None:
    config = ct(num_bits=8, type="int", strategy="group", group_size=G, symmetric=symmetric)
    place = config["config_groups"]["group_0"] if of_group else config
    place["format"] = form
    roles = stored.roles_of(config)
    assert roles == tuple(tensors)
    matrix = read_tensors(tensors, N, K, read_quantization({"quantization_config": config}))
    least = 128 if symmetric else ZEROS.repeat_interleave(G, 1)
    values = dequantize(matrix, torch.float64)
    assert torch.equal(values, (CODES - least) * SCALE.double().repeat_interleave(G, 1))


def test_integers_of_4_bits_may_lie_in_bytes() -> None:
    config = ct(num_bits=4, type="int", strategy="channel", symmetric=True)
    assert stored.roles_of(config | {"format": "int-quantized"}) == ("weight", "weight_scale")
    assert stored.roles_of(config | {"format": "marlin-24"}) is None


@pytest.mark.parametrize(
    ("config", "how"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, "HQQ"),
        ({**GPTQ_CONFIG, "bits": 8}, "GPTQ in 8 bits"),
        (ct(num_bits=3, type="int"), "compressed-tensors in 3 bits"),
        ({**GPTQ_CONFIG, "desc_act": True}, "GPTQ in 4 bits with sorted columns (desc_act)"),
        *(
            (
                ct(num_bits=bits, type="int", group_size=32, actorder=order),
                f"compressed-tensors in {bits} bits with sorted columns (actorder)",
            )
            for bits, order in ((4, "group"), (4, "dynamic"), (8, True))
        ),
    ],
)
def test_what_ktk_reads_elsewhere_is_said_where_vllm_has_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, config: Any, how: str
) -> None:
    choice.say_once.said.clear()
    sentence = (
        f"ktk does not compute weights stored by {how} in vLLM: ktk serve MODEL --engine "
        "transformers reads them from the model's files"
    )
    assert f"ktk does not compute {stored.refused(config, 'vLLM')}" == sentence
    with caplog.at_level("INFO", logger="vllm.ktk"):
        amx(monkeypatch, True)
        assert not choice.takes_over(config, None, True)
        assert not caplog.records
        amx(monkeypatch, False)
        assert not choice.takes_over(config, None, True)
        assert not choice.takes_over(config, None, True)
    assert [one.getMessage() for one in caplog.records] == [f"{sentence} (if vLLM cannot)"]
    assert not stored.refused({"quant_method": "of next year"}, "vLLM")


@pytest.mark.parametrize(
    "config",
    [
        {**GPTQ_CONFIG, "bits": 8},
        {"quant_method": "hqq"},
        {"quant_method": "fp8", "weight_block_size": "wide"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        ct(num_bits=4, type="float", group_size=8),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        ct(num_bits=3, type="int"),
        # One matrix may have other tensors than the next.
        {
            **ct(num_bits=8, type="int"),
            "config_groups": {
                form: {"format": form, "weights": {"num_bits": 8, "type": "int"}}
                for form in ("pack-quantized", "int-quantized")
            },
        },
    ],
)
def test_what_ktk_does_not_read(config: dict[str, Any]) -> None:
    assert stored.roles_of(config) is None


def moe(name: str, **changes: Any) -> Any:
    names = ("swiglu_alpha", "swiglu_limit", "swiglu_beta")
    plain = dict.fromkeys((*names, "activation_situ_beta", "activation_situ_linear_beta"))
    return SimpleNamespace(activation=SimpleNamespace(value=name), **{**plain, **changes})


def test_activations() -> None:
    assert activation_of(moe("silu")) == {"activation": "silu", "activation_limit": None}
    assert activation_of(moe("swigluoai")) == {
        "activation": "swigluoai",
        "activation_alpha": 1.702,
        "activation_limit": 7.0,
    }
    limited = activation_of(moe("swigluoai_uninterleave", swiglu_limit=5.0, swiglu_beta=1.0))
    assert limited is not None
    assert limited["activation_limit"] == 5.0
    for same in ("gelu", "gelu_tanh", "relu2"):
        assert activation_of(moe(same)) == {"activation": same, "activation_limit": None}
    step = {"activation": "swiglustep", "activation_limit": 7.0}
    for limit in (None, 7.0):
        assert activation_of(moe("swiglustep", swiglu_limit=limit)) == step
    for beta in (25.0, None):
        betas = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": beta}
        caps = {"gate_softcap": 4.0, "up_softcap": beta}
        assert activation_of(moe("situ", **betas)) == {"activation": "situ", **caps}
    others = (
        *map(moe, ("situ", "relu2_no_mul")),
        moe("swigluoai", swiglu_beta=0.0),
        moe("swiglustep", swiglu_limit=5.0),
    )
    for other in others:
        assert activation_of(other) is None


def test_workers_are_where_openmp_is() -> None:
    assert bound_cpus({"GOMP_CPU_AFFINITY": "3 1-2"}) == [3, 1, 2]
    kmp = {"KMP_AFFINITY": "granularity=fine,explicit,proclist=[0,2,4]"}
    assert bound_cpus(kmp) == [0, 2, 4]
    assert bound_cpus({"OMP_PLACES": "{5,6}", "OMP_PROC_BIND": "true"}) == [5, 6]
    assert bound_cpus({"OMP_PLACES": "cores"}) == []
    assert bound_cpus({}) == []


@pytest.mark.parametrize(
    ("value", "cpus"),
    [
        ("0 3 1-2 4-15:2", [0, 3, 1, 2, 4, 6, 8, 10, 12, 14]),
        ("0-10:20,3", [0, 3]),
        (" 0 1 ", [0, 1]),
        ("0,,1,", [0, 1]),
        ("0 1 , 0-1", [0, 1]),
        *((malformed, []) for malformed in ("", " ", ",", "-", "1-", "-1", "3-1", "0-3:0", "0:2")),
        *((malformed, []) for malformed in ("1-2-3", "0x1", "a", "0-99999999999", "\u0663")),
    ],
)
def test_cpus_are_read_as_openmp_does(value: str, cpus: list[int]) -> None:
    assert bound_cpus({"GOMP_CPU_AFFINITY": value}) == cpus


def test_shares_of_cpus_are_even_and_nobodys_else() -> None:
    cores = [0, 2, 4, 6, 8]
    for ranks in range(1, 6):
        shares = [share(cores, rank, ranks) for rank in range(ranks)]
        assert [core for one in shares for core in one] == cores
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [share([7], rank, 3) for rank in range(3)] == [[7], [7], [7]]


_POOL = """
import os
cpus = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cpus[:1])
os.environ["GOMP_CPU_AFFINITY"] = " ".join(map(str, cpus))
from ktk.hosts.pool import worker_pool
assert worker_pool(0, 1).cpus == cpus, worker_pool(0, 1).cpus
assert os.sched_getaffinity(0) == {cpus[0]}
"""


@pytest.mark.slow
def test_a_bound_thread_does_not_bind_the_workers() -> None:
    subprocess.run([sys.executable, "-c", _POOL], check=True)


_ABSENT = """
import os
from ktk.hosts.pool import worker_pool
cpus = sorted(os.sched_getaffinity(0))
def pool(value):
    os.environ["GOMP_CPU_AFFINITY"] = value
    return worker_pool.__wrapped__(0, 1).cpus
assert pool(f"{cpus[-1]}-{cpus[-1] + 3000}") == cpus[-1:]
unbound = pool("")
for value in ("60000", "50000-60000:7", "0-", "0-99999999999"):
    assert pool(value) == unbound, value
assert os.sched_getaffinity(0) == set(cpus)
"""


@pytest.mark.slow
def test_cpus_that_are_not_there_are_passed_over() -> None:
    subprocess.run([sys.executable, "-c", _ABSENT], check=True)


def test_without_vllm_the_plug_in_only_says_so(caplog: pytest.LogCaptureFixture) -> None:
    if find_spec("vllm") is not None:
        pytest.skip("vLLM is there")
    with caplog.at_level("WARNING", logger="vllm.ktk"):
        ktk.vllm.register()
    assert "has its layers of experts elsewhere" in caplog.text
