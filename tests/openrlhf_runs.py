"""OpenRLHF's real `Actor` and replay buffer on the CPU, in a process of their own: without Ray, DeepSpeed or a GPU.

It imports flash-attn for its helpers of padding, and deepspeed for what only sharded models need; both have stand-ins
here. Everything else is OpenRLHF's own code.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed

import augtree_fx


class _Device(str):
    """What stands for ``torch.cuda.current_device()``: the CPU, that can be written as a number of a GPU."""

    def __format__(self, _: str) -> str:
        return "0"


def stand_in() -> None:
    """Modules that OpenRLHF imports, as far as an unsharded model on one rank needs them."""
    from einops import rearrange

    def unpad_input(hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
        lengths, indices = mask.sum(-1), mask.flatten().nonzero().flatten()
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return hidden.flatten(0, 1)[indices], indices, offsets, int(lengths.max()), lengths

    def pad_input(hidden: Tensor, indices: Tensor, batch: int, sequence: int) -> Tensor:
        padded = hidden.new_zeros(batch * sequence, *hidden.shape[1:]).index_copy(0, indices, hidden)
        return padded.unflatten(0, (batch, sequence))

    def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
        return tensor[indices]

    padding = {
        "index_first_axis": index_first_axis, "pad_input": pad_input, "rearrange": rearrange,
        "unpad_input": unpad_input,
    }  # fmt: skip
    modules: dict[str, dict[str, Any]] = {
        "flash_attn": {}, "flash_attn.bert_padding": padding, "flash_attn.utils": {},
        "flash_attn.utils.distributed": {"all_gather": None}, "deepspeed": {},
    }  # fmt: skip
    for name, values in modules.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(values)
    torch.cuda.current_device = lambda: _Device("cpu")  # type: ignore[assignment,return-value]


@dataclass
class Outcome:
    """Losses, gradient norms and names of parameters of an actor's updates; what was shared."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    num_shared: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


def experience() -> Any:
    """Four groups of four rows, as OpenRLHF keeps them: responses after prompts, padded on the right."""
    from openrlhf.trainer.ppo_utils.experience import Experience

    generator = torch.Generator().manual_seed(5)
    lengths = [(60 + 5 * (row // 4), 8 + row % 5) for row in range(16)]
    prompts = [torch.randint(3, 259, (60 + 5 * group,), generator=generator) for group in range(4)]
    sequences = torch.zeros(16, max(map(sum, lengths)), dtype=torch.long)
    attention_mask, action_mask = torch.zeros_like(sequences), torch.zeros_like(sequences[:, 1:])
    for row, (prompt, response) in enumerate(lengths):
        sequences[row, :prompt] = prompts[row // 4]
        sequences[row, prompt : prompt + response] = torch.randint(3, 259, (response,), generator=generator)
        attention_mask[row, : prompt + response] = 1
        action_mask[row, prompt - 1 : prompt + response - 1] = 1
    return Experience(
        sequences=sequences, attention_mask=attention_mask, action_mask=action_mask.bool(),
        total_length=attention_mask.sum(-1), index=list(range(16)),
    )  # fmt: skip


def run(path: str, hooked: bool, changes: dict[str, Any]) -> Outcome:
    """Three updates of a real `Actor`, with the library's hooks or without."""
    stand_in()
    from augtree_fx.integrations import openrlhf as integration

    if hooked:
        integration.install()
    try:
        from openrlhf.models.actor import Actor

        torch.manual_seed(0)
        actor = Actor(path, attn_implementation="sdpa", **changes).float().train()
    finally:
        integration.uninstall()
    actor.gradient_checkpointing_enable()
    parameters = [parameter for parameter in actor.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    found, rows = Outcome(names=list(actor.state_dict())), experience()
    advantages = torch.arange(16.0).sub(7.5)[:, None]
    for _ in range(3):
        optimizer.zero_grad()
        logps, output = actor(
            rows.sequences, rows.action_mask, rows.attention_mask, return_output=True, return_entropy=True
        )
        loss = -(logps * advantages).sum() / 100 - 0.01 * (output.entropy * rows.action_mask).mean()
        loss.backward()
        found.losses.append(loss.item())
        found.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
    if hooked:
        said = augtree_fx.explain(actor.model)
        found.num_shared, found.fallbacks = said.num_shared, said.fallbacks
    return found


def buffer(dynamic: bool) -> Any:
    from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer

    made = NaiveReplayBuffer(4, cpu_offload=False, dynamic_batch=dynamic)
    made.append(experience())
    return made


def sampled() -> list[list[int]]:
    """Micro-batches of a shuffled pass over a real replay buffer, as groups of its rows; the loader is the hook's."""
    stand_in()
    from torch.utils.data import DataLoader

    from augtree_fx.integrations.openrlhf import _sampling

    rows = buffer(dynamic=False)
    loader = _sampling(DataLoader)(
        rows, batch_size=4, shuffle=True, drop_last=True, pin_memory=False, collate_fn=rows.collate_fn
    )
    first = [int(group) for group in experience().sequences[::4, 0]]
    return [[first.index(int(token)) for token in batch.sequences[:, 0]] for batch in loader]


def in_dynamic_batches() -> tuple[list[list[int]], list[float], list[list[int]]]:
    """Rows of dynamic micro-batches and their weights in the loss, and what OpenRLHF itself chooses."""
    stand_in()
    from augtree_fx.integrations import openrlhf as integration

    arguments = SimpleNamespace(
        train=SimpleNamespace(batch_size=16, max_tokens_per_gpu=400),
        rollout=SimpleNamespace(batch_size=4, n_samples_per_prompt=4),
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1),
    )
    group = SimpleNamespace(get_group=lambda: distributed.group.WORLD)
    strategy = SimpleNamespace(args=arguments, ds_device_mesh={"dp": group}, all_reduce=lambda tensor, op: tensor)
    plain, grouped = buffer(dynamic=True), buffer(dynamic=True)
    plain.setup_dynamic_batch(strategy)
    integration.install()
    try:
        grouped.setup_dynamic_batch(strategy)
    finally:
        integration.uninstall()
    return grouped.dynamic_indices, grouped.dynamic_sample_loss_scale, plain.dynamic_indices
