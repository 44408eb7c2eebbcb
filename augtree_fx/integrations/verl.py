"""verl: ``actor_rollout_ref.model.external_lib=augtree_fx.integrations.verl`` shares the prompts of groups.

Every worker imports that module before it builds a model, and importing this one calls `install`:

- models that `FSDPEngine` builds, policy, reference and critic, are transformed before LoRA and FSDP;
- with ``use_dynamic_bsz`` the rows of a group, wherever they lie, go into one micro-batch: as many micro-batches as
  verl makes, under the same limit of tokens. Without, micro-batches are runs of rows, in verl's order.

Groups must reach one rank whole: ``actor.use_prefix_grouper=true`` makes verl balance whole groups over ranks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable
from typing import Any

from augtree_fx.integrations.grouping import balanced_groups, groups_of_rows
from augtree_fx.integrations.hooks import Hook, install_hooks, remove_hooks, transform_or_say_why

logger = logging.getLogger("augtree_fx")

ADVICE = (
    "set use_dynamic_bsz=true, or make ppo_micro_batch_size_per_gpu a multiple of rollout.n with rows in order of "
    "prompts; and use_prefix_grouper=true, so that groups stay on one rank"
)


def install() -> None:
    """Hook verl's FSDP engine in this process; calling it again changes nothing."""
    install_hooks(HOOKS)


def uninstall() -> None:
    """Undo `install`. Models that were built meanwhile stay transformed; `augtree_fx.restore` undoes that."""
    remove_hooks(HOOKS)


def _transforming(original: Callable[..., Any]) -> Callable[..., Any]:
    """`FSDPEngine._build_module` whose model is transformed."""

    @functools.wraps(original)
    def build_module(self: Any) -> Any:
        module = original(self)
        degree = self.engine_config.ulysses_sequence_parallel_size
        if degree > 1:
            logger.warning(
                "augtree-fx: left unchanged: ulysses_sequence_parallel_size is %d, which cuts rows before the model "
                "sees them; set it to 1",
                degree,
            )
        else:
            transform_or_say_why(module, ADVICE)
        return module

    return build_module


def _grouping(original: Callable[..., Any]) -> Callable[..., Any]:
    """`prepare_micro_batches` that keeps groups whole where verl chooses which rows go together."""

    @functools.wraps(original)
    def prepare_micro_batches(data: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], list[list[int]] | None]:
        from verl.utils import tensordict_utils

        chunks, rows = original(data, *args, **kwargs)
        forced = tensordict_utils.get_non_tensor_data(data=data, key="force_group_size", default=1)
        if rows is None or len(rows) == 1 or forced > 1 or not data["input_ids"].is_nested:
            return chunks, rows
        tokens = data["input_ids"].offsets().diff().tolist()
        limit = int(data["max_token_len_per_gpu"])  # verl multiplies it by the Ulysses degree, which is 1 here
        grouped = balanced_groups(_groups(data), tokens, len(rows), limit)
        if grouped is None:  # groups do not fit: verl's own choice stays, and the model says that they are torn
            return chunks, rows
        return [tensordict_utils.index_select_tensor_dict(data, chunk) for chunk in grouped], grouped

    return prepare_micro_batches


def _groups(data: Any) -> list[Hashable]:
    """What tells the group of each row of a batch whose ``input_ids`` are nested."""
    rows = data["input_ids"].unbind()
    if "prompts" not in data.keys():
        return groups_of_rows(rows, [None] * len(rows))
    prompts = data["prompts"]
    if prompts.is_nested:
        return groups_of_rows(rows, prompts.unbind())
    masks = data["attention_mask"][:, : prompts.shape[1]].bool()  # of prompts and responses, as `prompts` is padded
    return groups_of_rows(rows, [prompt[mask] for prompt, mask in zip(prompts, masks, strict=True)])


_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
HOOKS = [
    Hook(_ENGINE, "FSDPEngine._build_module", _transforming),
    Hook(_ENGINE, "prepare_micro_batches", _grouping),
]

install()
