"""TRL: `enable(trainer)` shares the prompts of a trainer's groups, and logs what it gained.

    trainer = augtree_fx.integrations.trl.enable(GRPOTrainer(...))
    trainer.train()

TRL shuffles rows before it splits a generation batch into micro-batches, which tears groups. Here the rows are put in
order again after the shuffle, on this trainer alone: no function or class of TRL is replaced.

    trainer = augtree_fx.integrations.trl.enable(GRPOTrainer(...), rows="pooled")

computes the rows of data-parallel ranks together, under DDP or FSDP2: context parallelism for trainers that refuse it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import augtree_fx
from augtree_fx.integrations.grouping import group_order
from augtree_fx.integrations.pooled import POOLED, Pool, joined, pool_mesh, ranks_apart, split_rows, taken
from augtree_fx.integrations.report import TRAINING, Meter, state_of

logger = logging.getLogger("augtree_fx")

Trainer = TypeVar("Trainer")

TRIED = "1.16"
# Trainers whose micro-batches hold whole pairs, in whatever order. GRPO's and RLOO's are known by their buffer of rows.
KEEP_PAIRS = ("DPOTrainer", "KTOTrainer", "OnlineDPOTrainer")
MODELS = ("model", "ref_model")
_HOOKS = "_augtree_hooks"
_LOG_PROBS = "_get_per_token_logps_and_entropies"


def enable(
    trainer: Trainer,
    *,
    strict: bool = False,
    rows: str | None = None,
    degree: int | None = None,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> Trainer:
    """Transform a trainer's model and reference model, keep its groups together, and log what is shared.

    Args:
        trainer: GRPO, RLOO, DPO, KTO or OnlineDPO trainer of TRL, with PEFT or without, before `train`. Of any other
            `transformers.Trainer` models are transformed and metrics logged, and rows stay as they come.
        strict: raise on a model or batch that cannot be shared exactly. By default it runs unshared, and the log says
            so.
        rows: ``"pooled"`` computes the rows of several data-parallel ranks together: one tree, each rank a share of its
            tokens. In GRPO and RLOO rows change ranks, so that those of a group meet in one micro-step, and their
            prompts are padded to one width. Losses that are a sum over rows or tokens stay what they are in the mean
            over ranks; terms of TRL that depend on which rows are in one micro-batch (``loss_type="bnpo"``,
            ``top_entropy_quantile``) see others, as they do under another shuffle. All ranks of a pool call the model
            together: a callback that runs it on one rank does so inside of `apart`. ``None``: every rank computes its
            own. On one process both are the same.
        degree: with ``"pooled"``, ranks that compute together; by default all processes of the accelerator.
        mesh: with ``"pooled"``, one axis of a device mesh over data-parallel ranks in place of that.
        **options: of `augtree_fx.transform`. A model that is transformed already keeps its own.

    Returns:
        The same object. `disable` undoes everything.

    Raises:
        TypeError: not a trainer with a model.
        ValueError: ``rows`` is unknown, ``degree`` or ``mesh`` come without it or together, ``degree`` does not divide
            the number of processes, rows are to be pooled and a model is transformed already, without a mesh, or the
            trainer is enabled already and this call asks for something. After an error the trainer is as it was.
        NotImplementedError: ``strict``, and the model cannot be transformed; or rows are to be pooled over ranks of
            something else than DDP and FSDP2.
    """
    if rows not in (None, POOLED):
        raise ValueError(
            f"rows must be 'pooled' or None, got {rows!r}: ranks of a trainer have rows of their own, never the same"
        )
    if rows is None and (degree is not None or mesh is not None):
        raise ValueError("degree and mesh say which ranks compute their rows together; pass rows='pooled' with them")
    if degree is not None and mesh is not None:
        raise ValueError(f"pass degree={degree} or a mesh, not both")
    before: _Hooks | None = getattr(trainer, _HOOKS, None)
    if before is not None and before.enabled:
        if options or rows is not None or strict:
            raise ValueError(
                f"{type(trainer).__name__} is enabled already; augtree_fx.integrations.trl.disable(trainer) first"
            )
        return trainer
    group_shuffle(trainer)
    hooks: _Hooks = getattr(trainer, _HOOKS)
    try:
        if rows == POOLED:
            hooks.check_not_transformed()
            axis = pool_mesh(hooks.trainer.accelerator, degree) if mesh is None else mesh
            options |= {} if axis is None else {"mesh": axis, "rows": POOLED}
        hooks.transform(strict, options)
    except BaseException:
        if before is None:
            disable(trainer)
        else:
            hooks.restore_models()
        raise
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

    Methods that were put over those of `enable` since then are gone as well, and the log says so.

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


@contextlib.contextmanager
def apart(trainer: Any) -> Iterator[None]:
    """Forwards inside are this rank's own, also where rows are pooled: for callbacks that run a model on one rank."""
    hooks: _Hooks | None = getattr(trainer, _HOOKS, None)
    with ranks_apart([] if hooks is None else hooks.models):
        yield


class _Hooks:
    """What is changed about one trainer: attributes of the instance, which hide methods of its class."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.models = [model for name in MODELS if isinstance(model := getattr(trainer, name, None), nn.Module)]
        self._transformed: list[nn.Module] = []
        self._meter = Meter(self.models)
        self._overridden: dict[str, Callable[..., Any]] = {}
        self.enabled = False
        self._hidden: dict[str, Any] = {}
        self._seen: Any = None
        self._pool: Pool | None = None
        self._advise()
        self._log = self._override("log", self.log)
        if hasattr(trainer, "evaluation_loop"):
            self._evaluation_loop = self._override("evaluation_loop", self.evaluation_loop)
        if hasattr(trainer, "_buffered_inputs"):
            self._prepare = self._override("_prepare_inputs", self.prepare_inputs)
            if hasattr(trainer, _LOG_PROBS):
                self._log_probs = self._override(_LOG_PROBS, self.log_probs)
        elif not any(cls.__name__ in KEEP_PAIRS for cls in type(trainer).__mro__):
            _warn_unknown(trainer)
        self._join_pool()

    def _override(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(self.trainer, name)
        if name in vars(self.trainer):
            self._hidden[name] = original
        setattr(self.trainer, name, method)
        self._overridden[name] = method
        return original

    def check_not_transformed(self) -> None:
        for model in self.models:
            state = state_of(model)
            if state is not None and (state.lanes is None or state.lanes.rows != POOLED):
                raise ValueError(
                    f"a {type(model).__name__} of this trainer is transformed already, and does not pool rows; "
                    "augtree_fx.restore the trainer's model and ref_model first, or disable(trainer) what enable did"
                )

    def _join_pool(self) -> None:
        """Keep the ranks of a pool in step, where this trainer's rows are known."""
        if self._pool is not None or not hasattr(self.trainer, "_buffered_inputs"):
            return
        self._pool = Pool.of(self.models, _pad_token_id(self.trainer))
        if self._pool is None:
            return
        self._generate = self._override("_generate", self.generate)
        if not self._pool.movable:
            logger.warning(
                "augtree-fx: rows stay on their ranks, since %s looks positions up in a table, which padding shifts",
                type(self.trainer.model).__name__,
            )

    def transform(self, strict: bool, options: dict[str, Any]) -> None:
        for model in self.models:
            if state_of(model) is None:
                augtree_fx.transform(model, strict=strict, **options)
                if state_of(model) is not None:
                    self._transformed.append(model)
        self.enabled = True
        self._advise()
        self._join_pool()

    def remove(self) -> None:
        for name, method in self._overridden.items():
            if vars(self.trainer).pop(name, None) != method:
                logger.warning("augtree-fx: what was put in place of %s after enable(trainer) is gone with it", name)
        vars(self.trainer).update(self._hidden)
        self.restore_models()

    def restore_models(self) -> None:
        for model in self._transformed:
            if state_of(model) is not None:
                augtree_fx.restore(model)

    def _advise(self) -> None:
        """What torn groups mean in this trainer, whose rows are in order."""
        group = getattr(self.trainer, "num_generations", None)
        size = getattr(self.trainer.args, "per_device_train_batch_size", None)
        for state in filter(None, map(state_of, self.models)):
            if group is None:
                state.torn.advice = "put rows of one prompt next to each other in the dataset and do not shuffle it"
                continue
            lanes = state.lanes if state.lanes is not None and state.lanes.rows == POOLED else None
            num_ranks = 1 if lanes is None else len(lanes.host.ranks)
            multiple = f"num_generations {group}"
            if num_ranks > 1:
                multiple = (
                    f"{group // math.gcd(group, num_ranks)}, so that rows of the {num_ranks} ranks of a pool together "
                    f"are one of {multiple}"
                )
            state.torn.advice = (
                f"make per_device_train_batch_size, which is {size}, a multiple of {multiple}, with fewer "
                "gradient_accumulation_steps; enable(trainer, max_wave_tokens=...) bounds the memory of that"
            )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """`Trainer.log` with our metrics: those of an evaluation in its own log, which comes after it."""
        ended = [run for run in self._meter.evaluated() if any(name.startswith(f"{run}_") for name in logs)]
        run = max(ended, key=len, default=TRAINING)  # "eval_math" goes before "eval"
        prefix = f"{run}_" if ended else ""
        logs.update({prefix + name: value for name, value in self._meter.take(run).items()})
        return self._log(logs, *args, **kwargs)

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        """`Trainer.evaluation_loop`, counted apart from training."""
        with self._meter.evaluation(metric_key_prefix):
            return self._evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix=metric_key_prefix
            )

    def prepare_inputs(self, inputs: Any) -> Any:
        """`_prepare_inputs` that regroups the rows of each new generation batch."""
        prepared = self._prepare(inputs)
        buffered = self.trainer._buffered_inputs
        if not self.trainer.model.training or not buffered or buffered is self._seen:
            return prepared
        index = next((i for i, chunk in enumerate(buffered) if chunk is prepared), None)
        if index is None or "prompt_ids" not in buffered[0]:
            self._seen = buffered
            _warn_unknown(self.trainer)
            return prepared
        pool = self._pool if self._pool is not None and self._pool.movable else None
        self._seen = self.trainer._buffered_inputs = regroup(buffered, pool)
        return self._seen[index]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`_generate`, every rank for itself."""
        assert self._pool is not None
        with self._pool.apart():
            return self._generate(*args, **kwargs)

    def log_probs(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int,
        batch_size: int | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """`_get_per_token_logps_and_entropies`; in a pool, of rows whose prompts are as wide on all ranks.

        A generation batch is scored in the order of the dataset, before its rows are shuffled: where that takes several
        forwards, rows of a pool are scored where their groups meet.
        """
        pool = self._pool
        if pool is None:
            return self._score(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        prompt = input_ids.shape[1] - logits_to_keep
        input_ids, attention_mask = pool.padded(input_ids, attention_mask, prompt, batch_size)
        one_forward = not batch_size or len(input_ids) <= batch_size
        other_columns = any(isinstance(value, (Tensor, list)) for value in kwargs.values())
        whole = one_forward or torch.is_grad_enabled() or kwargs.get("compute_aux_loss")  # a mean over forwards
        if whole or not batch_size or other_columns or not pool.movable or len(input_ids) % batch_size:
            return self._score(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)

        def score(rows: dict[str, Any]) -> Any:
            ids, mask = (torch.cat([rows[f"prompt_{x}"], rows[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
            return self._score(model, ids, mask, rows["completion_ids"].shape[1], batch_size, **kwargs)

        found = pool.meeting(split_rows(input_ids, attention_mask, logits_to_keep, batch_size), _prompts, score)
        return tuple(None if value is None else value[:, :logits_to_keep] for value in found)

    def _score(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        """TRL's own, while models know how wide prompts are, which they count."""
        states = [state for state in map(state_of, self.models) if state is not None]
        for state in states:
            state.prompt_columns = input_ids.shape[1] - logits_to_keep
        try:
            return self._log_probs(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        finally:
            for state in states:
                state.prompt_columns = None


def _warn_unknown(trainer: object) -> None:
    logger.warning(
        "augtree-fx: %s does not keep its rows as trainers of trl %s do, so their order is not changed; order rows by "
        "prompt and make the micro-batch a multiple of the group",
        type(trainer).__name__,
        TRIED,
    )


def regroup(chunks: list[dict[str, Any]], pool: Pool | None = None) -> list[dict[str, Any]]:
    """Micro-batches of one generation batch with rows of equal prompts together.

    Args:
        chunks: as TRL buffers them: dicts of ``[rows, ...]`` tensors or lists (``prompt_ids`` and ``prompt_mask`` among
            them), of tensors without dimensions and of ``None``.
        pool: ranks that do this together: rows are then together in one micro-step of all of them.

    Raises:
        KeyError: there are no ``prompt_ids``.
        RuntimeError, NotImplementedError: see `Pool.regroup`.
    """
    from trl.trainer.utils import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid

    apart = [split_pixel_values_by_grid(chunk) for chunk in chunks]
    if pool is not None:
        return [unsplit_pixel_values_by_grid(chunk) for chunk in pool.regroup(apart, _prompts)]
    rows = {name: joined([chunk[name] for chunk in apart]) for name in apart[0]}
    order = group_order(_prompts(rows), len(chunks))
    ordered = {name: taken(value, order) for name, value in rows.items()}
    return [unsplit_pixel_values_by_grid(chunk) for chunk in split_tensor_dict(ordered, len(chunks))]


def _pad_token_id(trainer: Any) -> int:
    processing = getattr(trainer, "processing_class", None)
    tokenizer = getattr(processing, "tokenizer", processing)
    return int(getattr(tokenizer, "pad_token_id", None) or 0)


def _prompts(rows: dict[str, Any]) -> list[bytes]:
    ids, mask = rows["prompt_ids"], rows["prompt_mask"]
    return [row.tobytes() for row in ids.masked_fill(mask == 0, -1).cpu().numpy()]
