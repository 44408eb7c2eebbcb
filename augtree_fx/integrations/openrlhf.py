"""OpenRLHF: `install()` in every worker shares the prompts of groups. It has no setting for it; Ray has one:

    ray job submit --runtime-env-json '{"worker_process_setup_hook": "augtree_fx.integrations.openrlhf.install"}' ...

- models that `Actor` loads, policy and reference, are transformed, before DeepSpeed wraps them;
- the shuffle of the replay buffer keeps rows of a group together, and so does dynamic batching.

``--train.micro_batch_size`` should be a multiple of ``--rollout.n_samples_per_prompt``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from augtree_fx.integrations.grouping import balanced_groups, group_order, groups_of_rows
from augtree_fx.integrations.hooks import Hook, install_hooks, remove_hooks, transform_or_say_why

ADVICE = "make the micro-batch a multiple of n_samples_per_prompt, or use dynamic batching"


class GroupSampler(Sampler[int]):
    """A shuffle of a replay buffer in which rows of a group stay together, in one micro-batch where they fit.

    Args:
        buffer: OpenRLHF's replay buffer; groups are read off its items' prompts when a pass over it starts.
        batch_size: rows of a micro-batch.
    """

    def __init__(self, buffer: Any, batch_size: int) -> None:
        self._buffer, self._batch_size = buffer, batch_size

    def __len__(self) -> int:
        return len(self._buffer)

    def __iter__(self) -> Iterator[int]:
        shuffled = torch.randperm(len(self)).tolist()
        groups = _groups(self._buffer.items)
        order = group_order([groups[row] for row in shuffled], max(len(self) // self._batch_size, 1))
        return iter([shuffled[row] for row in order])


def install() -> None:
    """Hook OpenRLHF in this process, as its modules are imported; calling it again changes nothing."""
    install_hooks(HOOKS)


def uninstall() -> None:
    """Undo `install`. Models that were loaded meanwhile stay transformed; `augtree_fx.restore` undoes that."""
    remove_hooks(HOOKS)


def _transforming(original: Callable[..., None]) -> Callable[..., None]:
    """`Actor.__init__` whose model is transformed."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        transform_or_say_why(self.model, ADVICE)

    return init


def _sampling(original: Callable[..., Any]) -> Callable[..., Any]:
    """`DataLoader` of the policy's training, whose shuffle keeps groups together."""

    def make(dataset: Any, batch_size: int = 1, shuffle: bool = False, **kwargs: Any) -> Any:
        if not shuffle or not hasattr(dataset, "items"):
            return original(dataset, batch_size=batch_size, shuffle=shuffle, **kwargs)
        return original(dataset, batch_size=batch_size, sampler=GroupSampler(dataset, batch_size), **kwargs)

    return make


def _grouping(original: Callable[..., None]) -> Callable[..., None]:
    """`setup_dynamic_batch` with whole groups: as many micro-batches an update, under the same limit of tokens."""

    @functools.wraps(original)
    def setup_dynamic_batch(self: Any, strategy: Any) -> None:
        original(self, strategy)
        args = strategy.args
        limit = args.train.max_tokens_per_gpu * args.ds.ring_attn_size * args.ds.tensor_parallel_size
        begin = 0
        for index, ends_update in enumerate(self.dynamic_optimizer_step):
            if ends_update:
                _regroup_update(self, slice(begin, index + 1), limit)
                begin = index + 1

    return setup_dynamic_batch


def _regroup_update(buffer: Any, part: slice, limit: int) -> None:
    """Whole groups in the micro-batches of one update, and their weights in its loss: rows of each over rows of all."""
    chunks = buffer.dynamic_indices[part]
    rows = sorted(row for chunk in chunks for row in chunk)
    items = [buffer.items[row] for row in rows]
    tokens = [int(item.total_length) for item in items]
    found = balanced_groups(_groups(items), tokens, len(chunks), limit)
    if found is not None:  # otherwise OpenRLHF's own choice stays, and the model says that groups are torn
        buffer.dynamic_indices[part] = [[rows[i] for i in chunk] for chunk in found]
        buffer.dynamic_sample_loss_scale[part] = [len(chunk) / len(rows) for chunk in found]


def _groups(items: Sequence[Any]) -> list[Hashable]:
    """What tells the group of each item."""
    rows = [item.sequences[item.attention_mask.bool()] for item in items]
    return groups_of_rows(rows, [_prompt(item) for item in items])


def _prompt(item: Any) -> Tensor | None:
    """Tokens before the first action, all of a row that was cut inside of its prompt; ``None`` where nothing says."""
    if item.action_mask is None:
        return None
    first = item.action_mask.nonzero()[:1].flatten().tolist()  # action_mask[t] is that of token t + 1
    end = first[0] + 1 if first else len(item.sequences)
    prompt: Tensor = item.sequences[:end][item.attention_mask[:end].bool()]
    return prompt


HOOKS = [
    Hook("openrlhf.models.actor", "Actor.__init__", _transforming),
    Hook("openrlhf.trainer.ppo_utils.replay_buffer", "NaiveReplayBuffer.setup_dynamic_batch", _grouping),
    Hook("openrlhf.trainer.ray.ppo_actor", "DataLoader", _sampling),
]
