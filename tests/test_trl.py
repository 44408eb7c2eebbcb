"""TRL's real trainers with `integrations.trl.enable`: losses and gradient norms of the plain trainer, and whole groups.

The plain trainer puts its rows in the same order with code of its own (`trl_runs.in_groups`). Models are float64, so
1e-5 leaves room for nothing but what models and TRL compute in float32: norms, rewards, log-probs, logged losses.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig

import augtree_fx
from augtree_fx import CostModel
from augtree_fx.integrations import trl as integration

trl = pytest.importorskip("trl")

import trl_runs  # noqa: E402  (imports trainers' packages)
from trl_runs import Run, arguments, digit_share, in_groups, prompts, saved, tokenizer, train  # noqa: E402

GROUP = 4
# GRPO losses are sums of advantages of either sign that cancel: differences are relative to at least this much.
LOSS_FLOOR = 0.01
# Every value of every option; all 96 are slow.
COVERING = {
    ("llama", False, True, 0.0, 4, 2), ("qwen3", False, False, 0.1, 2, 1), ("qwen3", True, True, 0.1, 8, 2),
    ("llama", True, False, 0.0, 8, 1),
}  # fmt: skip
ALL = itertools.product(("llama", "qwen3"), (False, True), (False, True), (0.0, 0.1), (2, 4, 8), (1, 2))
SWEEP = [pytest.param(*case, marks=() if case in COVERING else pytest.mark.slow) for case in ALL]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: saved(name, str(tmp_path_factory.mktemp(name))) for name in trl_runs.FAMILIES}


def lora(use: bool, dropout: float = 0.0) -> LoraConfig | None:
    if not use:
        return None
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=dropout)


def enabled(trainer: Any, **options: Any) -> Any:
    return integration.enable(trainer, costs=CostModel.free(), **options)


def assert_same(got: Run, expected: Run) -> None:
    assert len(got.losses) >= 5
    assert got.losses == pytest.approx(expected.losses, rel=1e-5, abs=1e-5 * LOSS_FLOOR)
    assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    assert max(expected.grad_norms) > 1e-3, "equal gradients that are zero prove nothing"
    assert [x.tolist() for x in got.rows] == [x.tolist() for x in expected.rows]


def grpo(
    trainer_class: type, model: Any, folder: Path, *, use_lora: bool = False, dropout: float = 0.0, size: int = 8,
    **changes: Any,
) -> Any:  # fmt: skip
    config = trl.RLOOConfig if issubclass(trainer_class, trl.RLOOTrainer) else trl.GRPOConfig
    given: dict[str, Any] = {
        "num_generations": GROUP, "max_completion_length": 8, "per_device_train_batch_size": size,
        "gradient_accumulation_steps": 2 if size > GROUP else 8 // size, "model_init_kwargs": {"dtype": "auto"},
        **changes,
    }  # fmt: skip
    return trainer_class(
        model, digit_share, args=config(**arguments(str(folder), **given)), train_dataset=prompts(),
        eval_dataset=prompts().select(range(2)), processing_class=tokenizer(), peft_config=lora(use_lora, dropout),
    )  # fmt: skip


@pytest.mark.parametrize(("family", "checkpointing", "use_lora", "beta", "size", "iterations"), SWEEP)
def test_grpo_is_that_of_the_plain_trainer_and_groups_are_whole(
    checkpoints: dict[str, str], tmp_path: Path, family: str, checkpointing: bool, use_lora: bool, beta: float,
    size: int, iterations: int,
) -> None:  # fmt: skip
    changes = {"beta": beta, "num_iterations": iterations, "gradient_checkpointing": checkpointing}

    def make(trainer_class: type) -> Any:
        return grpo(trainer_class, checkpoints[family], tmp_path, use_lora=use_lora, size=size, **changes)

    expected = train(lambda: make(in_groups(trl.GRPOTrainer)))
    got = train(lambda: enabled(make(trl.GRPOTrainer)))
    assert_same(got, expected)
    num_micro_batches = 2 if size > GROUP else 8 // size
    assert got.groups == [[min(size, GROUP)] * max(size // GROUP, 1)] * (num_micro_batches * 5)
    assert min(got.metric("augtree/token_ratio")) > 1.3
    assert got.metric("augtree/unshared_batches") == [0] * 5
    scored = beta > 0 or iterations > 1
    assert bool(got.metric("augtree/scoring_token_ratio")) == scored
    assert not scored or min(got.metric("augtree/scoring_token_ratio")) > 1.3
    assert sum(got.metric("augtree/tokens")) == sum(int((rows >= 0).sum()) for rows in got.rows)


@pytest.mark.parametrize("use_lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rloo(checkpoints: dict[str, str], tmp_path: Path, use_lora: bool) -> None:
    def make(trainer_class: type) -> Any:
        return grpo(trainer_class, checkpoints["qwen3"], tmp_path, use_lora=use_lora, beta=0.1)

    expected, got = train(lambda: make(in_groups(trl.RLOOTrainer))), train(lambda: enabled(make(trl.RLOOTrainer)))
    assert_same(got, expected)
    assert got.groups == [[GROUP, GROUP]] * 10
    assert min(got.metric("augtree/token_ratio")) > 1.3


@pytest.mark.parametrize(
    ("use_lora", "checkpointing"), [(False, True), pytest.param(True, False, marks=pytest.mark.slow)]
)
def test_dpo(checkpoints: dict[str, str], tmp_path: Path, use_lora: bool, checkpointing: bool) -> None:
    def make() -> Any:
        changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
        changes |= {"gradient_checkpointing": checkpointing, "model_init_kwargs": {"dtype": "auto"}}
        return trl.DPOTrainer(
            checkpoints["llama"], args=trl.DPOConfig(**arguments(str(tmp_path), **changes)),
            train_dataset=trl_runs.preferences(), processing_class=tokenizer(), peft_config=lora(use_lora),
        )  # fmt: skip

    expected, got = train(make), train(lambda: enabled(make()))
    assert_same(got, expected)
    assert got.groups == [[2] * 4] * 10
    assert min(got.metric("augtree/token_ratio")) > 1.3 and min(got.metric("augtree/scoring_token_ratio")) > 1.3


def test_kto(checkpoints: dict[str, str], tmp_path: Path) -> None:
    def make() -> Any:
        changes = {"per_device_train_batch_size": 4, "model_init_kwargs": {"dtype": "auto"}}
        return trl.KTOTrainer(
            checkpoints["qwen3"],
            args=trl.KTOConfig(**arguments(str(tmp_path), train_sampling_strategy="sequential", **changes)),
            train_dataset=trl_runs.judged(), processing_class=tokenizer(),
        )  # fmt: skip

    expected, got = train(make), train(lambda: enabled(make()))
    assert_same(got, expected)
    assert got.groups == [[2, 2]] * 5
    assert min(got.metric("augtree/token_ratio")) > 1.3


def test_online_dpo(checkpoints: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    online = pytest.importorskip("trl.experimental.online_dpo")

    def make() -> Any:
        changes = {"per_device_train_batch_size": 4, "max_new_tokens": 8, "max_length": 128}
        return online.OnlineDPOTrainer(
            trl_runs.model("llama"), reward_funcs=digit_share,
            args=online.OnlineDPOConfig(**arguments(str(tmp_path), **changes)), train_dataset=prompts(),
            processing_class=tokenizer(),
        )  # fmt: skip

    expected, got = train(make), train(lambda: enabled(make()))
    assert_same(got, expected)
    assert min(got.metric("augtree/token_ratio")) > 1.3 and min(got.metric("augtree/scoring_token_ratio")) > 1.3


def test_evaluation_and_a_model_given_as_an_object(checkpoints: dict[str, str], tmp_path: Path) -> None:
    def evaluated(wrap: Any) -> dict[str, float]:
        trl_runs.transformers.set_seed(3)
        model = trl_runs.LlamaForCausalLM.from_pretrained(checkpoints["llama"], dtype="auto")
        trainer = wrap(grpo(trl.GRPOTrainer, model, tmp_path, beta=0.1, per_device_eval_batch_size=4))
        return trainer.evaluate()

    expected, got = evaluated(lambda trainer: trainer), evaluated(enabled)
    assert got["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert got["eval_kl"] == pytest.approx(expected["eval_kl"], rel=1e-5, abs=1e-9)


def test_training_and_evaluation_are_counted_apart(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """Evaluations between two logs of training."""
    changes = {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 3, "per_device_eval_batch_size": 4}
    run = train(
        lambda: enabled(grpo(trl.GRPOTrainer, checkpoints["llama"], tmp_path, max_steps=3, beta=0.1, **changes))
    )
    evaluations = [log for log in run.logs if "eval_loss" in log]
    assert len(evaluations) == 3
    for log in evaluations:
        assert {name for name in log if "augtree/" in name and "scoring" not in name} == set()
        assert log["eval_augtree/scoring_tokens"] > 0
    (training,) = [log for log in run.logs if "augtree/tokens" in log]
    assert training["augtree/tokens"] == sum(int((rows >= 0).sum()) for rows in run.rows)
    assert training["augtree/scoring_tokens"] == training["augtree/tokens"]  # the reference model's, once a row


def test_batches_that_run_the_original_forward_are_counted(
    checkpoints: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dropout of LoRA hinders sharing: two micro-batches a step, of which the tokens are counted all the same."""

    def make() -> Any:
        return enabled(grpo(trl.GRPOTrainer, checkpoints["llama"], tmp_path, use_lora=True, dropout=0.1, max_steps=2))

    run = train(make)
    assert "the original forward runs" in caplog.text
    assert run.metric("augtree/unshared_batches") == [2, 2] and run.metric("augtree/token_ratio") == [1, 1]
    assert sum(run.metric("augtree/tokens")) == sum(int((rows >= 0).sum()) for rows in run.rows)
    assert run.metric("augtree/rows_per_group") == []


def test_metrics_of_an_evaluation_have_its_prefix(checkpoints: dict[str, str], tmp_path: Path) -> None:
    trainer = enabled(grpo(trl.GRPOTrainer, checkpoints["llama"], tmp_path, beta=0.1, per_device_eval_batch_size=4))
    found = trainer.evaluate(metric_key_prefix="test")
    assert found["test_augtree/scoring_tokens"] > 0
    assert not [name for name in found if name.startswith(("augtree/", "eval_augtree/"))]
    trainer.evaluate(metric_key_prefix="test_long")
    (_, log) = [log for log in trainer.state.log_history if any("augtree" in name for name in log)]
    assert {name.partition("augtree")[0] for name in log if "augtree" in name} == {"test_long_"}


def test_rows_of_a_prompt_are_counted_by_the_trainer_s_prompts(checkpoints: dict[str, str], tmp_path: Path) -> None:
    """One group of 8 whose halves begin with the same 100 tokens: more than the prompt has."""
    trainer = enabled(grpo(trl.GRPOTrainer, checkpoints["llama"], tmp_path))
    generator = torch.Generator().manual_seed(1)
    prompt, openings, ends = (torch.randint(3, 259, size, generator=generator) for size in ((40,), (2, 100), (8, 9)))
    rows = torch.stack([torch.cat([prompt, openings[i % 2], end]) for i, end in enumerate(ends)])
    trainer._get_per_token_logps_and_entropies(trainer.model, rows, torch.ones_like(rows), 109)
    logs: dict[str, float] = {}
    trainer.log(logs)
    assert logs["augtree/rows_per_group"] == 8


@pytest.mark.slow
def test_waves_are_counted(checkpoints: dict[str, str], tmp_path: Path) -> None:
    def make(trainer_class: type) -> Any:
        return grpo(trainer_class, checkpoints["llama"], tmp_path)

    expected = train(lambda: make(in_groups(trl.GRPOTrainer)))
    got = train(lambda: enabled(make(trl.GRPOTrainer), max_wave_tokens=16))
    assert_same(got, expected)
    assert min(got.metric("augtree/waves")) >= 4


@pytest.fixture
def trainer(checkpoints: dict[str, str], tmp_path: Path) -> Iterator[Any]:
    yield grpo(trl.GRPOTrainer, checkpoints["llama"], tmp_path, beta=0.1)


def test_disabling_leaves_nothing(trainer: Any) -> None:
    modules = [trl.trainer.grpo_trainer, trl.trainer.rloo_trainer, trl.trainer.utils]
    before = [dict(vars(x)) for x in (*modules, type(trainer))]
    attributes = set(vars(trainer))
    classes = [type(module) for model in (trainer.model, trainer.ref_model) for module in model.modules()]
    integration.enable(trainer)
    assert [dict(vars(x)) for x in (*modules, type(trainer))] == before, "TRL itself is never changed"
    assert all(augtree_fx.explain(model).transformed for model in (trainer.model, trainer.ref_model))
    integration.disable(trainer)
    assert set(vars(trainer)) == attributes
    assert (
        trainer._prepare_inputs.__func__ is type(trainer)._prepare_inputs and trainer.log.__func__ is type(trainer).log
    )
    assert classes == [type(module) for model in (trainer.model, trainer.ref_model) for module in model.modules()]
    with pytest.raises(ValueError, match=r"GRPOTrainer is not enabled; augtree_fx.integrations.trl.enable\(trainer\)"):
        integration.disable(trainer)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rows": "pooled", "degree": 3}, "degree must divide the number of processes 1, got 3"),
        ({"rows": "pooled", "mesh": object()}, "mesh must be one axis of a DeviceMesh, got object"),
        ({"kernel": "nope"}, "kernel must be one of"),
        ({"max_wave_tokens": -5}, "max_wave_tokens must be at least 1"),
        ({"foo": 1}, "unexpected keyword argument 'foo'"),
    ],
)
def test_an_error_of_enable_leaves_nothing(trainer: Any, options: dict[str, Any], error: str) -> None:
    attributes = set(vars(trainer))
    with pytest.raises((ValueError, TypeError), match=error):
        integration.enable(trainer, **options)
    assert set(vars(trainer)) == attributes
    assert not any(augtree_fx.explain(model).transformed for model in (trainer.model, trainer.ref_model))


def test_a_refused_reference_model_leaves_the_policy_as_it_was(trainer: Any) -> None:
    sizes = {"hidden_size": 8, "n_layer": 1, "n_head": 2, "vocab_size": 50}
    trainer.ref_model = transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))
    with pytest.raises(NotImplementedError, match="Bloom"):
        integration.enable(trainer, strict=True)
    assert not augtree_fx.explain(trainer.model).transformed
    with pytest.raises(ValueError, match="is not enabled"):
        integration.disable(trainer)


def test_other_options_need_another_enable(trainer: Any) -> None:
    integration.enable(trainer)
    with pytest.raises(ValueError, match=r"is enabled already; augtree_fx.integrations.trl.disable\(trainer\) first"):
        integration.enable(trainer, max_wave_tokens=16)
    integration.enable(integration.disable(trainer), max_wave_tokens=16)


def test_what_was_put_over_enable_is_said_to_be_gone(trainer: Any, caplog: pytest.LogCaptureFixture) -> None:
    integration.enable(trainer)
    trainer.log = functools.partial(trainer.log)
    integration.disable(trainer)
    assert "what was put in place of log after enable(trainer) is gone with it" in caplog.text
    assert "log" not in vars(trainer)


def test_a_model_that_the_user_transformed_stays_so(trainer: Any) -> None:
    augtree_fx.transform(trainer.model)
    integration.group_shuffle(trainer)
    assert not augtree_fx.explain(trainer.ref_model).transformed
    integration.enable(integration.enable(trainer))
    integration.disable(trainer)
    assert [augtree_fx.explain(model).transformed for model in (trainer.model, trainer.ref_model)] == [True, False]


def test_only_trainers_are_enabled() -> None:
    with pytest.raises(TypeError, match="expected a trainer of TRL with a model, got Linear"):
        integration.enable(torch.nn.Linear(1, 1))


def test_torn_groups_are_said_once_with_what_to_change(
    checkpoints: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`transform` alone: TRL's shuffle tears groups. With `enable`, only a micro-batch below the group does."""

    def transformed(trainer: Any) -> Any:
        augtree_fx.transform(trainer.model, costs=CostModel.free())
        return trainer

    def warnings(make: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="augtree_fx"):
            train(make)
        return [record.getMessage() for record in caplog.records if record.name == "augtree_fx"]

    def run(size: int) -> Any:
        changes = {"num_generations": 8, "gradient_accumulation_steps": 16 // size, "max_steps": 3}
        return grpo(trl.GRPOTrainer, checkpoints["llama"], tmp_path, size=size, **changes)

    (found,) = warnings(lambda: transformed(run(4)))
    assert "rows of one prompt arrive in different micro-batches: " in found
    assert "rows a group of 8; call augtree_fx.integrations.trl.enable(trainer)" in found
    (found,) = warnings(lambda: enabled(run(4)))
    assert "4.0 rows a group of 8; make per_device_train_batch_size, which is 4, a multiple of" in found
    assert warnings(lambda: enabled(run(8))) == []


@pytest.mark.parametrize("name", trl_runs.FAMILIES)
def test_the_call_form_of_trl_0_24(name: str) -> None:
    """`_get_per_token_logps_and_entropies` of trl 0.24: logits of the last tokens, sliced and divided by hand."""
    plain, model = trl_runs.model(name), augtree_fx.transform(trl_runs.model(name), costs=CostModel.free())
    prompt, completion = torch.randint(3, 259, (2, 20)).repeat_interleave(4, 0), torch.randint(3, 259, (8, 6))
    input_ids = torch.cat([prompt, completion], dim=1)
    mask = torch.ones_like(input_ids)
    mask[:4, :3] = 0  # prompts are padded on the left
    mask[5, -2:] = 0
    losses = []
    for each in (plain, model):
        given = {"input_ids": input_ids, "attention_mask": mask, "use_cache": False, "logits_to_keep": 6 + 1}
        logits = each(**given).logits[:, :-1, :][:, -6:, :] / 0.9
        logps = torch.gather(logits.log_softmax(-1), -1, completion[..., None])[..., 0]
        loss = (logps * mask[:, -6:]).sum() / 8
        loss.backward()
        losses.append(loss)
    assert augtree_fx.explain(model).num_shared == 1
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)  # norms compute in float32
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


class Unknown:
    """As a trainer of another version might be: it buffers its rows, under names of its own."""

    def __init__(self, buffered: Any = None) -> None:
        self.model, self.args, self.logs = trl_runs.model("llama").train(), None, []
        if buffered is not None:
            self._buffered_inputs = buffered

    def _prepare_inputs(self, inputs: Any) -> Any:
        return self._buffered_inputs[0]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.logs.append(logs)


def test_unknown_trainers_run_and_are_said(caplog: pytest.LogCaptureFixture) -> None:
    said = (
        "Unknown does not keep its rows as trainers of trl 1.16 do, so their order is not changed; order rows by prompt"
    )
    trainer = integration.enable(Unknown())
    assert augtree_fx.explain(trainer.model).transformed and caplog.text.count(said) == 1
    trainer.log({"loss": 1.0})
    assert trainer.logs == [{"loss": 1.0}], "nothing was computed, so there is nothing to log"
    caplog.clear()
    chunks = [{"tokens": torch.zeros(2, 3)}, {"tokens": torch.ones(2, 3)}]
    trainer = integration.enable(Unknown(chunks))
    for _ in range(3):
        assert trainer._prepare_inputs(None) is chunks[0]
    assert caplog.text.count(said) == 1


def test_regrouped_micro_batches_keep_rows_whole() -> None:
    """Tensors, lists, numbers and None move together; images of a row, of which rows have several, go with it."""
    group = torch.tensor([0, 1, 2, 0, 1, 2, 2, 0, 1, 1, 2, 0])
    images = [1, 2, 1, 1, 3, 1, 1, 1, 2, 1, 1, 1]
    pixels = torch.arange(12.0).repeat_interleave(torch.tensor(images))[:, None]

    def chunk(begin: int) -> dict[str, Any]:
        rows = slice(begin, begin + 4)
        first = sum(images[:begin])
        return {
            "prompt_ids": group[rows, None].expand(-1, 3), "prompt_mask": torch.ones(4, 3),
            "row": torch.arange(12)[rows],
            "names": [str(row) for row in range(begin, begin + 4)], "num_items_in_batch": torch.tensor(7), "old": None,
            "num_images": images[rows], "pixel_values": pixels[first : first + sum(images[rows])],
        }  # fmt: skip

    regrouped = integration.regroup([chunk(0), chunk(4), chunk(8)])
    rows = [each["row"].tolist() for each in regrouped]
    assert [set(group[row].tolist()) for row in rows] == [{0}, {1}, {2}]
    for each, row in zip(regrouped, rows, strict=True):
        assert each["names"] == [str(number) for number in row]
        assert (each["num_items_in_batch"].item(), each["old"]) == (7, None)
        assert each["num_images"] == [images[number] for number in row]
        assert each["pixel_values"][:, 0].tolist() == [float(number) for number in row for _ in range(images[number])]
