"""What ranks run in tests of TRL's trainers with pooled rows: plain trainers with rows in the same order, and ours."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
import trl
import trl_runs
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from trl_runs import LlamaForCausalLM, Run, arguments, digit_share, judged, preferences, prompts, tokenizer

from augtree_fx import CostModel, explain
from augtree_fx.integrations import trl as integration
from augtree_fx.integrations.report import state_of
from augtree_fx.transforms import find_stack

PROMPT = ("prompt_ids", "prompt_mask")
PROMPTS_ALONE = CostModel(16.0, 0.0)  # a token or two that responses begin with are no group


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


@contextlib.contextmanager
def fsdp_on_the_cpu() -> Iterator[None]:
    """accelerate heeds its FSDP plugin on GPUs alone, and runs DDP on the CPU without a word: lift that one condition.

    What then shards the model, `accelerate.utils.fsdp_utils.fsdp2_prepare_model`, is its own.
    """
    init = AcceleratorState.__init__

    def sharding(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        self.fsdp_plugin = fsdp_plugin or self.__dict__.get("fsdp_plugin")
        if self.fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP

    with mock.patch.object(AcceleratorState, "__init__", sharding):
        yield


def fsdp2(family: str) -> dict[str, Any]:
    layer = {"llama": "LlamaDecoderLayer", "qwen3": "Qwen3DecoderLayer"}[family]
    return {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": [layer]}}


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


@dataclass
class Found:
    """What a rank found.

    Attributes:
        plain, ours: the two runs.
        computed: tokens that ours put through the first layer with gradients.
        num_sharded: parameters that FSDP2 sharded, of ours.
    """

    plain: Run
    ours: Run
    computed: int
    num_sharded: int


def build(kind: str, family: str, folder: str, *, use_lora: bool, sharded: bool, wrap: Any, **changes: Any) -> Any:
    """A trainer on this rank, whose model lies in a folder of the family's name."""
    model = os.path.join(folder, family)
    given = arguments(os.path.join(folder, f"rank{distributed.get_rank()}"), **changes)
    if given.pop("uneven", False):
        given["generation_kwargs"] = {"use_cache": False, "max_new_tokens": 6 + 5 * distributed.get_rank()}
    given |= {"model_init_kwargs": {"dtype": "auto"}} | (fsdp2(family) if sharded else {})
    shared: dict[str, Any] = {"processing_class": tokenizer(), "peft_config": lora() if use_lora else None}
    if kind == "dpo":
        return wrap(trl.DPOTrainer)(model, args=trl.DPOConfig(**given), train_dataset=preferences(), **shared)
    if kind == "kto":
        config = trl.KTOConfig(**given, train_sampling_strategy="sequential")
        return wrap(trl.KTOTrainer)(model, args=config, train_dataset=judged(), **shared)
    if kind == "online":
        from trl.experimental import online_dpo

        del given["model_init_kwargs"], shared["peft_config"]
        config = online_dpo.OnlineDPOConfig(**given, max_new_tokens=8, max_length=128)
        policy = LlamaForCausalLM.from_pretrained(model, dtype="auto")
        return wrap(online_dpo.OnlineDPOTrainer)(
            policy, reward_funcs=digit_share, args=config, train_dataset=prompts(), **shared
        )
    config, trainer_class = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}[kind]
    if sharded:  # of one length: ranks that generate longer than others would wait for FSDP2's transfers alone
        given["generation_kwargs"] = {"min_new_tokens": given["max_completion_length"]}
    return wrap(trainer_class)(
        model, digit_share, args=config(**given), train_dataset=prompts(),
        eval_dataset=prompts().select(range(3)), **shared,
    )  # fmt: skip


def both(kind: str, family: str, folder: str, options: dict[str, Any]) -> Found:
    """The plain trainer's run and ours, on the same ranks with the same rows.

    Args:
        kind: ``"grpo"``, ``"rloo"``, ``"dpo"``, ``"kto"`` or ``"online"`` (OnlineDPO).
        family: of the model.
        folder: where its checkpoint lies.
        options: ``use_lora``, ``sharded`` (FSDP2), ``degree``, ``as_dealt`` (the plain trainer's rows stay as it deals
            them), ``evaluate``, ``uneven`` (ranks generate different numbers of tokens, without a KV cache); the rest
            goes to the trainer's config.
    """
    transformers.logging.set_verbosity_error()
    options = {"use_lora": False, "sharded": False, **options}
    degree, evaluate = options.pop("degree", None), options.pop("evaluate", False)
    as_dealt = options.pop("as_dealt", kind not in ("grpo", "rloo"))
    made = functools.partial(build, kind, family, folder, **options)
    computed: list[int] = []

    def ours() -> Any:
        trainer = made(wrap=lambda trainer_class: trainer_class)
        integration.enable(trainer, rows="pooled", degree=degree, costs=PROMPTS_ALONE)
        for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
            state_of(model).lanes.min_chunk_tokens = 1  # shares of all ranks, however few tokens there are
        layers = find_stack(trainer.model).layers
        layers[0].register_forward_pre_hook(lambda _, args: computed.append(args[0].shape[1]) if _grad() else None)
        return trainer

    with fsdp_on_the_cpu() if options["sharded"] else contextlib.nullcontext():
        plain, _ = run(functools.partial(made, wrap=(lambda x: x) if as_dealt else across_ranks), evaluate)
        found, trainer = run(ours, evaluate)
    sharded = sum(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    return Found(plain, found, sum(computed), sharded)


def _grad() -> bool:
    return torch.is_grad_enabled()


def run(make: Any, evaluate: bool) -> tuple[Run, Any]:
    AcceleratorState._reset_state(True)
    trainers = []

    def kept() -> Any:
        trainers.append(make())
        return trainers[0]

    found = trl_runs.train(kept)
    if evaluate:
        found.logs.append(trainers[0].evaluate())
    AcceleratorState._reset_state(True)
    return found, trainers[0]


def enabled(folder: str) -> Any:
    """A trainer that pools."""
    AcceleratorState._reset_state(True)
    options = {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 2, "beta": 0.1}
    trainer = build("grpo", "llama", folder, use_lora=False, sharded=False, wrap=lambda x: x, **options)
    integration.enable(trainer, rows="pooled")
    AcceleratorState._reset_state(True)
    return trainer


def disabled(folder: str) -> list[str]:
    """What is left of pooling on a trainer."""
    trainer = enabled(folder)
    assert {"_generate", "_get_per_token_logps_and_entropies", "_prepare_inputs", "log"} <= set(vars(trainer))
    integration.disable(trainer)
    models = {name: getattr(trainer, name) for name in ("model", "ref_model")}
    methods = [name for name, value in vars(trainer).items() if callable(value) and hasattr(type(trainer), name)]
    return methods + [name for name, model in models.items() if state_of(model) is not None]


def torn(folder: str) -> str | None:
    """What is said of groups of 8 on two ranks with 2 rows of a micro-step each."""
    transformers.logging.set_verbosity_error()
    options = {"num_generations": 8, "max_completion_length": 4, "per_device_train_batch_size": 2}
    options |= {"gradient_accumulation_steps": 8, "max_steps": 2, "use_lora": False, "sharded": False}
    _, trainer = run(
        lambda: integration.enable(build("grpo", "llama", folder, wrap=lambda x: x, **options), rows="pooled"), False
    )
    return explain(trainer.model).torn


def disagreements(folder: str) -> list[str]:
    """What each of two ranks is told when they differ."""
    rank, pool = distributed.get_rank(), enabled(folder)._augtree_hooks._pool
    ids = torch.full((4, 3), 7)

    def rows(num_rows: int, width: int) -> dict[str, Any]:
        whole = ids[:num_rows]
        return {
            "prompt_ids": whole, "prompt_mask": whole, "completion_ids": whole, "completion_mask": whole,
            "token_type_ids": torch.zeros(num_rows, width),
        }  # fmt: skip

    return [
        _said(lambda: pool.padded(ids, ids, 2, 4 - rank)),
        _said(lambda: pool.padded(ids[: 3 + rank], ids[: 3 + rank], 2, 2)),
        _said(lambda: pool.regroup([rows(2 - rank, 3)], integration._prompts)),
        _said(lambda: pool.regroup([rows(2, 3)] * (1 + rank), integration._prompts)),
        _said(lambda: pool.regroup([rows(2, 8 + rank)], integration._prompts)),
    ]


def _said(call: Any) -> str:
    try:
        call()
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return "no error"
