"""An update step of GRPO in waves, and what its peak of memory is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import augtree_fx
from augtree_fx import TreeLayout
from augtree_fx.examples.bench.grpo import Batch, clipped_loss

FLOAT32_BYTES = 4


def update(model: Any, batch: Batch, max_tokens: int, watch: Watch | None = None) -> tuple[Tensor, Tensor]:
    """Fresh gradients of a batch in the parameters' ``.grad``, in waves of ``max_tokens`` packed tokens.

    Args:
        model: a transformed model.
        batch: rows of one group.
        max_tokens: of a wave.
        watch: is told when prompts and waves are done.

    Returns:
        The loss, and ``[rows, response]`` log-probs.
    """
    watch = watch or Watch()
    model.zero_grad(set_to_none=True)
    prompt, responses = batch.input_ids[0, : batch.prompt], batch.input_ids[:, batch.prompt :]
    layout = TreeLayout.from_groups([prompt], [list(responses)], device=batch.input_ids.device)
    total, logps = torch.zeros((), device=batch.input_ids.device), torch.empty_like(batch.old_logps)
    with augtree_fx.prefill(model, layout, max_wave_tokens=max_tokens) as tree:
        watch.mark()
        for wave in tree.waves():
            place = (wave.row, wave.index - batch.prompt)
            found = wave.logprobs()
            loss = clipped_loss(found, batch.old_logps[place], batch.advantages[wave.row], batch.num_scored)
            loss.backward()
            logps[place] = found.detach()
            total = total + loss.detach()
            del found, loss  # or the wave would live until the next one is there
            watch.mark()
    return total, logps


class Watch:
    """Is told of the moments between the parts of an update; this one does nothing."""

    def mark(self) -> None:
        """Prompts, or a wave, are done."""


class MemoryWatch(Watch):
    """Reads a CUDA device's allocated memory at each mark, and the peak since the one before."""

    def __init__(self) -> None:
        self.bytes: list[int] = [torch.cuda.memory_allocated()]
        self.peak_bytes: list[int] = []
        torch.cuda.reset_peak_memory_stats()

    def mark(self) -> None:
        self.bytes.append(torch.cuda.memory_allocated())
        self.peak_bytes.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True)
class Memory:
    """GiB beyond the weights and their gradients: what the peak of an update in waves is made of, and the peak.

    Attributes:
        prompts: activations, K and V of the prompts, as they are kept.
        kv_gradients: of the prompts' K and V, in float32.
        wave: the most that one wave takes on top: the second one, the first that allocates nothing that stays.
        prompt_backward: the most that the backward through the prompts takes on top of what is kept.
        peak: of the whole update.
    """

    prompts: float
    kv_gradients: float
    wave: float
    prompt_backward: float
    peak: float

    @property
    def expected(self) -> float:
        """What the parts add up to."""
        return self.prompts + self.kv_gradients + max(self.wave, self.prompt_backward)

    def __str__(self) -> str:
        return (
            f"prompts {self.prompts:.1f} GiB + gradients of their K and V {self.kv_gradients:.1f} + the larger of one "
            f"wave {self.wave:.1f} and backward of prompts {self.prompt_backward:.1f} = {self.expected:.1f}; peak "
            f"{self.peak:.1f} ({self.peak / self.expected:.3f} of that), beyond weights and gradients"
        )


def watched_update(model: Any, batch: Batch, max_tokens: int) -> tuple[tuple[Tensor, Tensor], Memory | None]:
    """An `update`, and its memory on a CUDA device; ``None`` on the CPU, and where there are fewer than two waves."""
    if batch.input_ids.device.type != "cuda":
        return update(model, batch, max_tokens), None
    model.zero_grad(set_to_none=True)
    watch = MemoryWatch()
    found = update(model, batch, max_tokens, watch)
    watch.mark()
    if len(watch.bytes) < 5:  # start, prompts, two waves, end
        return found, None
    start, prompts, first, *_ = watch.bytes
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    config = model.config
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * batch.prompt * FLOAT32_BYTES
    parts = (
        prompts - start,
        kv,
        watch.peak_bytes[2] - first,
        watch.peak_bytes[-1] - watch.bytes[-2],
        max(watch.peak_bytes) - start - gradients,
    )
    return found, Memory(*(part / 2**30 for part in parts))
