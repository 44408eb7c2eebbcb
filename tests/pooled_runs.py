"""What ranks run in tests of TRL's trainers with pooled rows: the trainer plain, with rows in the same order, and ours."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import transformers
import trl
import trl_runs
from accelerate.state import AcceleratorState
from peft import LoraConfig
from torch import Tensor, distributed
from torch.nn.utils.rnn import pad_sequence
from trl_runs import Run, arguments, digit_share, preferences, prompts, tokenizer

from augtree_fx import CostModel
from augtree_fx.integrations import trl as integration

PROMPT, COMPLETION = ("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask")


def across_ranks(trainer_class: type) -> type:
    """Plain TRL whose rows of equal prompts meet in one micro-step of all ranks: our order of rows, by code of its own.

    Rows are taken apart, tokens without padding, sorted by where their prompt comes first, dealt and padded again.
    """

    class AcrossRanks(trainer_class):  # type: ignore[misc,valid-type]
        ordered: Any = None

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            inputs = super()._prepare_inputs(generation_batch)
            chunks = self._buffered_inputs
            if not self.model.training or chunks is self.ordered:
                return inputs
            index = [chunk is inputs for chunk in chunks].index(True)
            found: list[Any] = [None] * distributed.get_world_size()
            distributed.all_gather_object(found, [[_row(chunk, i) for i in range(_size(chunk))] for chunk in chunks])
            rows = [row for step in zip(*found, strict=True) for part in step for row in part]
            seen = [row["prompt_ids"].tolist() for row in rows]
            rows = [rows[i] for i in sorted(range(len(rows)), key=lambda i: seen.index(seen[i]))]
            size = _size(chunks[0])
            first = [size * (step * len(found) + distributed.get_rank()) for step in range(len(chunks))]
            self.ordered = self._buffered_inputs = [
                _batch(rows[begin : begin + size], rows, chunk) for begin, chunk in zip(first, chunks, strict=True)
            ]
            return self.ordered[index]

    AcrossRanks.__name__ = trainer_class.__name__
    return AcrossRanks


def _size(chunk: dict[str, Any]) -> int:
    return len(chunk["prompt_ids"])


def _row(chunk: dict[str, Any], row: int) -> dict[str, Tensor]:
    """What belongs to a row, its padding left out."""
    kept = {**dict.fromkeys(PROMPT, chunk["prompt_mask"][row].bool())}
    found = {}
    for name, value in chunk.items():
        if isinstance(value, Tensor) and value.ndim:
            mask = kept.get(name, chunk["completion_mask"][row].bool())
            found[name] = value[row][mask] if value.ndim > 1 else value[row]
    return found


def _batch(rows: list[dict[str, Tensor]], all_rows: list[dict[str, Tensor]], like: dict[str, Any]) -> dict[str, Any]:
    """Rows as a micro-batch, as wide as the widest row of all ranks."""
    batch = dict(like)
    for name, value in rows[0].items():
        if not value.ndim:
            batch[name] = torch.stack([row[name] for row in rows])
            continue
        widest = max((row[name] for row in all_rows), key=len)
        side = "left" if name in PROMPT else "right"
        batch[name] = pad_sequence([*(row[name] for row in rows), widest], batch_first=True, padding_side=side)[:-1]
    return batch


def fsdp2(family: str) -> dict[str, Any]:
    layer = {"llama": "LlamaDecoderLayer", "qwen3": "Qwen3DecoderLayer"}[family]
    return {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": [layer]}}


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def build(kind: str, family: str, folder: str, *, use_lora: bool, sharded: bool, wrap: Any, **changes: Any) -> Any:
    """A trainer on this rank, the model in float64."""
    model = trl_runs.model(family)
    given = arguments(os.path.join(folder, f"rank{distributed.get_rank()}"), **changes)
    given |= fsdp2(family) if sharded else {}
    shared: dict[str, Any] = {"processing_class": tokenizer(), "peft_config": lora() if use_lora else None}
    if kind == "dpo":
        return wrap(trl.DPOTrainer)(model, args=trl.DPOConfig(**given), train_dataset=preferences(), **shared)
    config, trainer_class = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}[kind]
    if sharded:  # of one length: ranks that generate longer than others would wait for FSDP2's transfers alone
        given["generation_kwargs"] = {"min_new_tokens": given["max_completion_length"]}
    return wrap(trainer_class)(
        model, digit_share, args=config(**given), train_dataset=prompts(),
        eval_dataset=prompts().select(range(3)), **shared,
    )  # fmt: skip


def both(
    kind: str, family: str, folder: str, *, use_lora: bool = False, sharded: bool = False,
    degree: int | None = None, evaluate: bool = False, **changes: Any,
) -> tuple[Run, Run]:  # fmt: skip
    """The plain trainer's run and ours, on the same ranks with the same rows."""
    transformers.logging.set_verbosity_error()
    made = functools.partial(build, kind, family, folder, use_lora=use_lora, sharded=sharded, **changes)

    def ours() -> Any:
        trainer = made(wrap=lambda trainer_class: trainer_class)
        return integration.enable(trainer, rows="pooled", degree=degree, costs=CostModel.free())

    plain = functools.partial(made, wrap=(lambda x: x) if kind == "dpo" or degree else across_ranks)
    return run(plain, evaluate), run(ours, evaluate)


def run(make: Any, evaluate: bool) -> Run:
    AcceleratorState._reset_state(True)
    trainers = []

    def kept() -> Any:
        trainers.append(make())
        return trainers[0]

    found = trl_runs.train(kept)
    if evaluate:
        found.logs.append(trainers[0].evaluate())
    AcceleratorState._reset_state(True)
    return found
