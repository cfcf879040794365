"""TRL's own trainers train adapters of packed experts, with TRL's defaults."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import training
import transformers
from tiny import VOCABULARY, H
from training import packed_by

import ktk
import ktk.sft
import ktk.transformers
from ktk.testing import bounds

pytestmark = pytest.mark.slow
folder, same_draws = training.folder, training.same_draws
BETA, EXAMPLES, WORDS = 0.1, 16, 4
#: Rewards are sums of differences of two models' logarithms of probabilities, each of a logit and
#: of a sum of all. Both sides have the same hidden states, of norm sqrt(H), and multiply them with
#: rows of norm 0.5 of the head, in f32 and in blocks of their own.
ROUNDED = BETA * (WORDS + 1) * 2 * 2 * bounds.gamma(H + bounds.EXTRA_ROUNDINGS) * H**0.5 * 0.5


@pytest.fixture
def trl() -> Any:
    # Not on top: it takes seconds, and collecting tests imports this module.
    return pytest.importorskip("trl", reason="needs TRL: pip install trl")


def _tokenizer() -> Any:
    """Return a tokenizer of as many words as the model knows, and three of them special."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>"]
    words = [*special, *(f"w{i}" for i in range(VOCABULARY - len(special)))]
    known = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(known, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def _words(begin: int, end: int) -> str:
    """Count up or down."""
    step = 1 if end > begin else -1
    return " ".join(f"w{i}" for i in range(begin, end, step))


def _arguments(kind: Any, folder: Path, **options: Any) -> Any:
    return kind(
        str(folder),
        max_steps=8,
        per_device_train_batch_size=EXAMPLES // 2,
        per_device_eval_batch_size=EXAMPLES,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )


def _loaded(folder: Path, backend: str) -> Any:
    """Return a model of which nothing is trained."""
    return packed_by(backend, folder).requires_grad_(False)


def _peft_config() -> Any:
    return pytest.importorskip("peft").LoraConfig(r=2, target_modules=["q_proj"])


def _with_peft(model: Any) -> Any:
    return pytest.importorskip("peft").get_peft_model(model, _peft_config())


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("backend", ["BF16", "AMXINT4"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "peft"])
def test_sft_learns(folder: Path, tmp_path: Path, trl: Any, backend: str, wrapped: bool) -> None:
    import datasets

    texts = [{"text": _words(i, i + 3 * WORDS)} for i in range(0, 10 * EXAMPLES, 10)]
    model = _loaded(folder, backend)
    if wrapped:
        model = _with_peft(model)
    ktk.sft.add_lora(model, rank=4)
    trainer = trl.SFTTrainer(
        model,
        _arguments(trl.SFTConfig, tmp_path),
        train_dataset=datasets.Dataset.from_list(texts),
        processing_class=_tokenizer(),
    )
    trained = {n: one for n, one in trainer.model.named_parameters() if one.requires_grad}
    assert {"q_proj" in name for name in trained} == ({True, False} if wrapped else {False})
    assert sum(".experts." in name for name in trained) == 2 * 6
    before = {name: one.detach().clone() for name, one in trained.items()}
    trainer.train()
    assert not any(torch.equal(one, before[name]) for name, one in trained.items())
    losses = _losses(trainer)
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("backend", ["BF16", "AMXINT8"])
@pytest.mark.parametrize(
    "reference", ["copy", "copy, peft", "peft", "peft by the trainer", "precomputed"]
)
def test_dpo_compares_with_the_model_without_adapters(
    folder: Path, tmp_path: Path, trl: Any, backend: str, reference: str
) -> None:
    """Rewards are what the models with and without the adapter say, each by itself.

    Without another model, TRL asks a model of PEFT again with PEFT's adapters as they were, or off.
    """
    import datasets

    pairs = [
        {
            "prompt": _words(i, i + WORDS),
            "chosen": " " + _words(i + WORDS, i + 2 * WORDS),
            "rejected": " " + _words(i + 2 * WORDS, i + WORDS),
        }
        for i in range(0, 10 * EXAMPLES, 10)
    ]
    data = datasets.Dataset.from_list(pairs)
    model = _loaded(folder, backend)
    # Copies share packed experts; those that get factors later are their own.
    other = copy.deepcopy(model) if "copy" in reference else None
    if reference.endswith("peft"):
        model = _with_peft(model)
    ktk.sft.add_lora(model, rank=4)
    by_trainer = {"peft_config": _peft_config()} if "trainer" in reference else {}
    trainer = trl.DPOTrainer(
        model,
        other,
        # Without autocast, so that both sides round alike; without the loss of routers beside.
        _arguments(
            trl.DPOConfig,
            tmp_path,
            beta=BETA,
            bf16=False,
            router_aux_loss_coef=0.0,
            precompute_ref_log_probs=reference == "precomputed",
        ),
        train_dataset=data,
        eval_dataset=data,
        processing_class=_tokenizer(),
        **by_trainer,
    )
    trained = {n for n, one in trainer.model.named_parameters() if one.requires_grad}
    assert sum(".experts." in name for name in trained) == 2 * 6
    trainer.train()
    losses = _losses(trainer)
    # Before the first step both are one function, and nothing is preferred.
    assert losses[0] == pytest.approx(math.log(2), abs=2 * ROUNDED)
    assert losses[-1] < losses[0] / 2
    found = trainer.evaluate()
    wanted = _rewards(trainer.model, _loaded(folder, backend), trainer.eval_dataset)
    for kind, reward in zip(("chosen", "rejected"), wanted, strict=True):
        assert abs(reward) > 100 * ROUNDED
        assert found[f"eval_rewards/{kind}"] == pytest.approx(reward, abs=ROUNDED)


def _rewards(model: Any, reference: Any, data: Any) -> list[float]:
    """Return mean rewards of completions that are chosen, and rejected."""
    both = [
        torch.tensor([a + b for a, b in zip(data["prompt_ids"], data[f"{kind}_ids"], strict=True)])
        for kind in ("chosen", "rejected")
    ]
    ids = torch.cat(both)
    assert ids.shape == (2 * EXAMPLES, 2 * WORDS + 1)
    sums = []
    for one in (model.eval(), reference):
        with torch.no_grad():
            logs = one(ids).logits.log_softmax(-1)
        each = logs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        sums.append(each[:, WORDS - 1 :].sum(1))
    rewards = BETA * (sums[0] - sums[1])
    return [float(half.mean()) for half in rewards.chunk(2)]
