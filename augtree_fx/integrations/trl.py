"""TRL: `enable(trainer)` shares the prompts of a trainer's groups, and logs what it gained.

    trainer = augtree_fx.integrations.trl.enable(GRPOTrainer(...))
    trainer.train()

TRL shuffles rows before it splits a generation batch into micro-batches, which tears groups. Here the rows are put in
order again after the shuffle, on this trainer alone: no function or class of TRL is replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import augtree_fx
from augtree_fx.integrations.grouping import group_order
from augtree_fx.integrations.report import Meter, state_of

logger = logging.getLogger("augtree_fx")

Trainer = TypeVar("Trainer")

TRIED = "1.16"
# Trainers whose micro-batches hold whole pairs, in whatever order. GRPO's and RLOO's are known by their buffer of rows.
KEEP_PAIRS = ("DPOTrainer", "KTOTrainer", "OnlineDPOTrainer")
MODELS = ("model", "ref_model")
_HOOKS = "_augtree_hooks"


def enable(trainer: Trainer, *, strict: bool = False, **options: Any) -> Trainer:
    """Transform a trainer's model and reference model, keep its groups together, and log what is shared.

    Args:
        trainer: GRPO, RLOO, DPO, KTO or OnlineDPO trainer of TRL, with PEFT or without, before `train`. Of any other
            `transformers.Trainer` models are transformed and metrics logged, and rows stay as they come.
        strict: raise on a model or batch that cannot be shared exactly. By default it runs unshared, and the log says
            so.
        **options: of `augtree_fx.transform`. A model that is transformed already keeps its own.

    Returns:
        The same object. `disable` undoes everything.

    Raises:
        TypeError: not a trainer with a model.
        NotImplementedError: ``strict``, and the model cannot be transformed.
    """
    group_shuffle(trainer)
    hooks: _Hooks = getattr(trainer, _HOOKS)
    hooks.transform(strict, options)
    return trainer


def group_shuffle(trainer: Trainer) -> Trainer:
    """Keep rows of equal prompts in one micro-batch of a trainer that shuffles rows (GRPO, RLOO), and log.

    Groups are shuffled, and members stay adjacent; the random numbers that are drawn are the unmodified trainer's. For
    a model that was transformed before; `enable` does both.

    Raises:
        TypeError: not a trainer with a model.
    """
    if not isinstance(getattr(trainer, "model", None), nn.Module) or not callable(getattr(trainer, "log", None)):
        raise TypeError(f"expected a trainer of TRL with a model, got {type(trainer).__name__}")
    if not hasattr(trainer, _HOOKS):
        setattr(trainer, _HOOKS, _Hooks(trainer))
    return trainer


def disable(trainer: Trainer) -> Trainer:
    """Undo `enable` and `group_shuffle`: methods are the class's own again, models that `enable` transformed restored.

    Raises:
        ValueError: the trainer is not enabled.
    """
    hooks: _Hooks | None = getattr(trainer, _HOOKS, None)
    if hooks is None:
        raise ValueError(
            f"{type(trainer).__name__} is not enabled; augtree_fx.integrations.trl.enable(trainer) does that"
        )
    hooks.remove()
    delattr(trainer, _HOOKS)
    return trainer


class _Hooks:
    """What is changed about one trainer: two attributes of the instance, which hide methods of its class."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._models = [model for name in MODELS if isinstance(model := getattr(trainer, name, None), nn.Module)]
        self._transformed: list[nn.Module] = []
        self._meter = Meter(self._models)
        self._hidden: dict[str, Any] = {}
        self._seen: Any = None
        self._advise()
        self._log = self._override("log", self.log)
        if hasattr(trainer, "_buffered_inputs"):
            self._prepare = self._override("_prepare_inputs", self.prepare_inputs)
        elif not any(cls.__name__ in KEEP_PAIRS for cls in type(trainer).__mro__):
            _warn_unknown(trainer)

    def _override(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(self._trainer, name)
        if name in vars(self._trainer):
            self._hidden[name] = original
        setattr(self._trainer, name, method)
        return original

    def transform(self, strict: bool, options: dict[str, Any]) -> None:
        for model in self._models:
            if state_of(model) is None:
                augtree_fx.transform(model, strict=strict, **options)
                if state_of(model) is not None:
                    self._transformed.append(model)
        self._advise()

    def remove(self) -> None:
        for name in ("log", "_prepare_inputs"):
            vars(self._trainer).pop(name, None)
        vars(self._trainer).update(self._hidden)
        for model in self._transformed:
            if state_of(model) is not None:
                augtree_fx.restore(model)

    def _advise(self) -> None:
        """What torn groups mean in this trainer, whose rows are in order."""
        args = self._trainer.args
        group = getattr(self._trainer, "num_generations", None)
        size = getattr(args, "per_device_train_batch_size", None)
        for state in filter(None, map(state_of, self._models)):
            state.torn.advice = (
                "put rows of one prompt next to each other in the dataset and do not shuffle it"
                if group is None
                else f"make per_device_train_batch_size, which is {size}, a multiple of num_generations {group}, with "
                "fewer gradient_accumulation_steps; enable(trainer, max_wave_tokens=...) bounds the memory of that"
            )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.log` with our metrics."""
        prefix = "eval_" if any(name.startswith("eval_") for name in logs) else ""
        logs.update({prefix + name: value for name, value in self._meter.take().items()})
        return self._log(logs, *args, **kwargs)

    def prepare_inputs(self, inputs: Any) -> Any:
        """`_prepare_inputs` that regroups the rows of each new generation batch."""
        prepared = self._prepare(inputs)
        buffered = self._trainer._buffered_inputs
        if not self._trainer.model.training or not buffered or buffered is self._seen:
            return prepared
        index = next((i for i, chunk in enumerate(buffered) if chunk is prepared), None)
        if index is None or "prompt_ids" not in buffered[0]:
            self._seen = buffered
            _warn_unknown(self._trainer)
            return prepared
        self._seen = self._trainer._buffered_inputs = regroup(buffered)
        return self._seen[index]


def _warn_unknown(trainer: object) -> None:
    logger.warning(
        "augtree-fx: %s does not keep its rows as trainers of trl %s do, so their order is not changed; order rows by "
        "prompt and make the micro-batch a multiple of the group",
        type(trainer).__name__,
        TRIED,
    )


def regroup(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Micro-batches of one generation batch with rows of equal prompts together.

    Args:
        chunks: as TRL buffers them: dicts of ``[rows, ...]`` tensors or lists (``prompt_ids`` and ``prompt_mask`` among
            them), of tensors without dimensions and of ``None``.

    Raises:
        KeyError: there are no ``prompt_ids``.
    """
    from trl.trainer.utils import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid

    apart = [split_pixel_values_by_grid(chunk) for chunk in chunks]
    rows = {name: _joined([chunk[name] for chunk in apart]) for name in apart[0]}
    order = group_order(_prompts(rows), len(chunks))
    ordered = {name: _taken(value, order) for name, value in rows.items()}
    return [unsplit_pixel_values_by_grid(chunk) for chunk in split_tensor_dict(ordered, len(chunks))]


def _prompts(rows: dict[str, Any]) -> list[bytes]:
    ids, mask = rows["prompt_ids"], rows["prompt_mask"]
    return [row.tobytes() for row in ids.masked_fill(mask == 0, -1).cpu().numpy()]


def _joined(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(values)
    return [row for value in values for row in value] if isinstance(first, list) else first


def _taken(value: Any, order: list[int]) -> Any:
    if isinstance(value, Tensor) and value.ndim:
        return value[order]
    return [value[row] for row in order] if isinstance(value, list) else value
