"""A pass over the batch: forward, a fixed loss, backward; what it leaves behind to compare, on the host.

Log-probs and their part of the backward go through the model's own head in chunks of tokens, so that no
``[tokens, vocabulary]`` tensor lives.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_outputs import MoeModelOutputWithPast

from augtree_fx.transforms import find_stack
from augtree_fx.verify.batches import Piece

HEAD_TOKENS = 1024  # of one chunk: 0.6 GB of float32 logits with Qwen3's vocabulary
LOSS_SCALE = {torch.float16: 1024.0}  # or gradients of a mean over tokens fall below float16's smallest numbers


@dataclass
class StackOutput(MoeModelOutputWithPast):
    """It has every field that a head looks at."""

    cross_attentions: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class Outcome:
    """What a pass leaves behind.

    Attributes:
        values: ``[scored, ...]`` float64 on the host: log-probs of next tokens, or outputs, row by row.
        loss: weighted mean of the values.
        seconds: forward and backward.
        gradients: of every parameter that has one, on the host.
        dtype: of the weights.
    """

    values: Tensor
    loss: float
    seconds: float
    gradients: dict[str, Tensor]
    dtype: torch.dtype


class WideCasts(TorchFunctionMode):
    """Turns the float32 up-casts of modelling code (norms, RoPE, softmax, routers) into float64 ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()

        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def scores_tokens(model: Any) -> bool:
    """Whether the model has a head over the vocabulary, so that its outputs are log-probs of next tokens."""
    return model.get_output_embeddings() is not None


def run(model: Any, pieces: Iterable[Piece], num_tokens: int, loss_scale: float) -> tuple[Tensor, float, float]:
    """Fresh gradients in the parameters' ``.grad``.

    Args:
        model: as it is to run, in evaluation mode.
        pieces: what goes through it, one after another.
        num_tokens: tokens of all pieces, by which the loss is divided.
        loss_scale: factor of all gradients; the loss that is returned is without it.

    Returns:
        Values, loss and seconds, as in `Outcome`.
    """
    model.zero_grad(set_to_none=True)
    step = _log_probs if scores_tokens(model) else _outputs
    _synchronize(model.device)
    start = time.perf_counter()
    found = [step(model, piece, loss_scale / num_tokens) for piece in pieces]
    _synchronize(model.device)
    seconds = time.perf_counter() - start
    values, weights = (torch.cat([part[index].cpu().double() for part in found]) for index in (0, 1))
    return values, float((values * weights).sum() / num_tokens), seconds


def harvest(model: nn.Module) -> dict[str, Tensor]:
    """Take the gradients off the model, to the host."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.cpu()
            parameter.grad = None
    return gradients


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _weights(row: int, shape: tuple[int, ...]) -> Tensor:
    """Weights of a row's values in the loss, 0.5 to 1.5: rows that were mixed up would otherwise not show."""
    generator = torch.Generator().manual_seed(row)
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5


def _log_probs(model: Any, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the next tokens of every row, and their weights in the loss; backward of the loss."""
    ids = piece.inputs["input_ids"].flatten()
    rows = [(row, first, count) for row, first, count in piece.rows if count > 1]
    if not rows:
        return torch.empty(0), torch.empty(0)
    slots = torch.cat([torch.arange(first, first + count - 1) for _, first, count in rows]).to(ids.device)
    weights = torch.cat([-_weights(row, (count - 1,)) for row, _, count in rows])
    stack = find_stack(model)
    picked = _hidden(model, stack, piece.inputs).flatten(0, 1)[slots]
    leaf = picked.detach().requires_grad_()
    values = []
    chunks = [x.split(HEAD_TOKENS) for x in (leaf, ids[slots + 1], (scale * weights).to(ids.device))]
    for hidden, targets, factor in zip(*chunks, strict=True):
        with _standing_in(stack, StackOutput(last_hidden_state=hidden[None])):
            logits = model(input_ids=targets[None], use_cache=False).logits[0]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logps = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
        (logps * factor).sum().backward()
        values.append(logps.detach())
    picked.backward(leaf.grad)
    return torch.cat(values), weights


def _hidden(model: Any, stack: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Last hidden states of the model's own forward, whose head is given one token alone."""
    found: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> Any:
        found.append(output.last_hidden_state)
        output.last_hidden_state = output.last_hidden_state[:, :1]
        return output

    hook = stack.register_forward_hook(keep)
    try:
        model(**inputs, use_cache=False)
    finally:
        hook.remove()
    assert len(found) == 1, f"{type(stack).__name__} must run once in a forward, it ran {len(found)} times"
    return found[0]


@contextlib.contextmanager
def _standing_in(stack: nn.Module, output: Any) -> Iterator[None]:
    """The stack gives a fixed output for the time being: the model's forward is then its head alone."""
    vars(stack)["forward"] = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del vars(stack)["forward"]


def _outputs(model: Any, piece: Piece, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs at every token (or of every row) and their weights in the loss; backward of the loss."""
    output = model(**piece.inputs, use_cache=False)
    names = [name for name in ("logits", "start_logits", "end_logits", "last_hidden_state") if name in output]
    width = piece.inputs["input_ids"].shape[1]
    parts, weights = [], []
    for row, first, count in piece.rows:
        for name in names:
            tensor = output[name]
            of_tokens = tensor.ndim > 2 or name != "logits"  # logits of a classifier of rows are [batch, labels]
            part = tensor.flatten(0, 1)[first : first + count] if of_tokens else tensor[first // width]
            parts.append(part.flatten())
            weights.append(_weights(row, tuple(part.shape)).flatten())
    values, factor = torch.cat(parts), torch.cat(weights)
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    (values * (scale * factor).to(values.device)).sum().backward()
    return values.detach(), factor
