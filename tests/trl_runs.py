"""Tiny runs of TRL's real trainers, and what a run did: for tests that compare them with and without sharing."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

if TYPE_CHECKING:  # absent where nothing but models is asked for
    from datasets import Dataset

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
QUESTIONS = [f"Of the numbers {a} and {a * 7 % 23}, which is larger? Answer:" for a in range(3, 27)]


@dataclass
class Run:
    """What a trainer did, seen from outside.

    Attributes:
        losses, grad_norms: of each optimizer step, as the trainer logs them.
        rows: the rows of each micro-batch, as the model is called with gradients.
        groups: rows of each prompt, for each of these calls.
        logs: everything that was logged.
    """

    losses: list[float]
    grad_norms: list[float]
    rows: list[Tensor] = field(default_factory=list)
    groups: list[list[int]] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)

    def metric(self, name: str) -> list[float]:
        return [log[name] for log in self.logs if name in log]


def tokenizer() -> ByT5Tokenizer:
    made = ByT5Tokenizer(extra_ids=0)
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


def model(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """Weights are equal for equal arguments. Float64, so that differences of losses are no rounding."""
    config_class, model_class = FAMILIES[family]
    transformers.set_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = config_class(**{**sizes, **special, **changes})
    return model_class(config).to(dtype)


def saved(family: str, folder: str) -> str:
    """A checkpoint, for trainers that take a name, and for reference models that are loaded by it."""
    model(family).save_pretrained(folder)
    return folder


def prompts() -> Dataset:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": question} for question in QUESTIONS])


def preferences() -> Dataset:
    from datasets import Dataset

    rows = [{"prompt": x, "chosen": f" {x[7]} it is", "rejected": f" not {x[-12:]}"} for x in QUESTIONS]
    return Dataset.from_list(rows)


def judged() -> Dataset:
    from datasets import Dataset

    rows = [
        {"prompt": x["prompt"], "completion": x[kind], "label": kind == "chosen"}
        for x in preferences()
        for kind in ("chosen", "rejected")
    ]
    return Dataset.from_list(rows)


def digit_share(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs inside of a group, also for random weights."""
    return [sum(map(ord, completion)) % 17 / 17 for completion in completions]


def arguments(folder: str, **changes: Any) -> dict[str, Any]:
    """Arguments of every trainer's config: on the CPU, nothing written, each step logged.

    SGD, since Adam divides a gradient by its own size: of one that is almost 0 it makes a whole step out of rounding,
    which models do in float32 here and there, and runs drift apart by that alone. Weights changed by 6e-8 move the
    gradient norms of a plain qwen3 with LoRA by up to 1e-2 within five steps of AdamW.
    """
    given: dict[str, Any] = {
        "output_dir": folder, "max_steps": 5, "optim": "sgd", "learning_rate": 0.1, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "seed": 3,
    }  # fmt: skip
    return {**given, **changes}


def train(make: Callable[[], Any]) -> Run:
    """Build a trainer and run it; the random numbers are the same in every run."""
    transformers.set_seed(3)
    trainer = make()
    with watched(trainer.model) as (rows, groups):
        trainer.train()
    logs = trainer.state.log_history
    steps = [log for log in logs if "loss" in log]
    return Run([s["loss"] for s in steps], [s["grad_norm"] for s in steps], rows, groups, logs)


@contextmanager
def watched(policy: nn.Module) -> Iterator[tuple[list[Tensor], list[list[int]]]]:
    """Rows and group sizes of each call with gradients; sampling and scoring run without."""
    rows: list[Tensor] = []
    groups: list[list[int]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        if not torch.is_grad_enabled() or labels is None:
            return
        mask = kwargs["attention_mask"].bool()
        rows.append(kwargs["input_ids"].masked_fill(~mask, -1))
        prompt_of = [tuple(ids.tolist()) for ids in kwargs["input_ids"].masked_fill(~mask | (labels != -100), -1)]
        groups.append([prompt_of.count(prompt) for prompt in dict.fromkeys(prompt_of)])

    handle = policy.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield rows, groups
    finally:
        handle.remove()


def in_groups(trainer_class: type) -> type:
    """A trainer that puts rows of equal prompts together after its own shuffle: plain TRL with our order of rows.

    Written for groups of one size that micro-batches divide or hold whole, without a look at the library.
    """

    class InGroups(trainer_class):  # type: ignore[misc,valid-type]
        ordered: Any = None

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            inputs = super()._prepare_inputs(generation_batch)
            chunks = self._buffered_inputs
            if not self.model.training or chunks is self.ordered:
                return inputs
            index = [chunk is inputs for chunk in chunks].index(True)
            whole = [[chunk[name] for chunk in chunks] for name in chunks[0]]
            prompt_of = [tuple(ids.tolist()) for chunk in chunks for ids in chunk["prompt_ids"]]
            order = sorted(range(len(prompt_of)), key=lambda row: prompt_of.index(prompt_of[row]))
            size = len(order) // len(chunks)
            self.ordered = self._buffered_inputs = [
                {
                    name: torch.cat(values)[order][i * size : (i + 1) * size] if _has_rows(values[0]) else values[0]
                    for name, values in zip(chunks[0], whole, strict=True)
                }
                for i in range(len(chunks))
            ]
            return self.ordered[index]

    InGroups.__name__ = trainer_class.__name__
    return InGroups


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()
