"""How far the transformed model is from the unmodified one, against how far that one is from itself in more digits.

Errors are in the 2-norm of a tensor: single elements of two equally good roundings differ by more than a factor of 2.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from augtree_fx.verify.passes import Outcome

FACTOR = 2.0  # invariant 2 of the design: at most twice the unmodified model's own error
# Norms of fewer random errors differ by more than that: two of 16 by 2.3, two of 4 by 7 once in a thousand times (F
# distribution), and those of one computation are not independent. Measured: 2.1 for the 4 sinks of gpt_oss.
FEW = 64
LOST = 0.5  # an own error above it: the gradient is rounding noise in the unmodified model too, of which sizes vary
LOST_FACTOR = 10.0
# Own errors of values above these are no rounding: the unmodified model does not compute its rows one by one.
ROUNDING = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.3, torch.float16: 0.3}


@dataclass(frozen=True)
class Difference:
    """One tensor, or the loss.

    Attributes:
        name: ``"log-probs"``, ``"outputs"``, ``"loss"``, or that of a parameter.
        largest: largest absolute difference between transformed and unmodified.
        relative: their difference over the unmodified one, in the 2-norm.
        error: of the transformed model against the truth, relative in the 2-norm; ``None`` without a truth.
        own_error: of the unmodified one.
        bound: what ``error`` may be; without a truth, what ``relative`` may be.
        elements: of the tensor.
    """

    name: str
    largest: float
    relative: float
    error: float | None = None
    own_error: float | None = None
    bound: float = math.nan
    elements: int = 1

    @property
    def is_lost(self) -> bool:
        """Whether it is rounding noise in the unmodified model."""
        return self.own_error is not None and not self.own_error <= LOST

    @property
    def passed(self) -> bool:
        """False also where anything is not a number."""
        judged = self.relative if self.error is None else self.error
        return judged <= self.bound and math.isfinite(self.largest)

    @property
    def excess(self) -> float:
        """How often the bound goes into it; not a number counts as infinite."""
        judged = self.relative if self.error is None else self.error
        found = judged / self.bound if self.bound else math.inf * judged if judged else 0.0
        return found if found == found else math.inf


@dataclass(frozen=True)
class Comparison:
    """All differences: of the values, of the loss, and of the gradient of every parameter."""

    values: Difference
    loss: Difference
    parameters: tuple[Difference, ...]

    def all(self) -> tuple[Difference, ...]:
        return (self.values, self.loss, *self.parameters)

    @property
    def failed(self) -> tuple[Difference, ...]:
        """What is over its bound, the worst first."""
        return tuple(sorted((x for x in self.all() if not x.passed), key=lambda x: -x.excess))

    @property
    def worst(self) -> tuple[Difference, ...]:
        """Parameters by how much of their bound they take, the most first."""
        return tuple(sorted(self.parameters, key=lambda x: -x.excess))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _ratio(difference: float, size: float) -> float:
    return difference / size if size else math.inf if difference else difference


def _differ(name: str, ours: Tensor, plain: Tensor, truth: Tensor | None) -> Difference:
    """Differences of one tensor, still without a bound."""
    wide = torch.float64 if truth is None or truth.dtype == torch.float64 else torch.float32
    device = plain.device if truth is None else truth.device
    ours, plain = (x.to(device, torch.promote_types(x.dtype, wide)) for x in (ours, plain))
    largest = float((ours - plain).abs().max()) if ours.numel() else 0.0
    relative = _ratio(_norm(ours - plain), _norm(plain))
    if truth is None:
        return Difference(name, largest, relative, elements=ours.numel())
    size = _norm(truth)
    error, own_error = (_ratio(_norm(x - truth), size) for x in (ours, plain))
    return Difference(name, largest, relative, error, own_error, elements=ours.numel())


def _gradients(
    model: nn.Module, ours: Outcome, plain: Outcome, truth: Callable[[nn.Parameter], Tensor | None] | None
) -> Iterator[Difference]:
    """Parameter by parameter; a gradient that was not there counts as zeros."""
    for name, parameter in model.named_parameters():
        found = [outcome.gradients.get(name) for outcome in (ours, plain)]
        exact = None if truth is None else truth(parameter)
        if exact is None and found == [None, None]:
            continue
        zeros = torch.zeros(parameter.shape, dtype=parameter.dtype)
        if truth is not None and exact is None:
            exact = zeros.to(parameter.device)
        mine, own = (zeros if x is None else x for x in found)
        yield _differ(name, mine, own, exact)
        parameter.grad = None


def compare(
    model: Any,
    what: str,
    ours: Outcome,
    plain: Outcome,
    truth: Outcome | None,
    factor: float = FACTOR,
    least: float = 0.0,
    tolerance: float | None = None,
) -> Comparison:
    """Compare two passes.

    Args:
        model: where the truth's gradients still are, so that no third copy of them is made.
        what: name of the values.
        ours: pass of the transformed model.
        plain: pass of the unmodified model.
        truth: pass of the unmodified model in more digits, or ``None``.
        factor: how many times the unmodified model's own error ours may be.
        least: what every bound is at least.
        tolerance: bound of relative differences between the two passes, in place of a measured one.
    """
    least = max(least, 4 * torch.finfo(plain.dtype).eps)  # where the unmodified model happens to round to the truth
    values = _differ(what, ours.values, plain.values, None if truth is None else truth.values)
    grads = list(_gradients(model, ours, plain, None if truth is None else lambda parameter: parameter.grad))
    loss = _loss(ours.loss, plain.loss, None if truth is None else truth.loss)
    if tolerance is not None:
        values, loss, *grads = (_bounded(x, tolerance) for x in (values, loss, *grads))
        return Comparison(values, loss, tuple(grads))
    known = [x.own_error for x in grads if x.own_error is not None and not x.is_lost]
    typical = max(factor * statistics.median(known) if known else 0.0, least)
    values = _measured(values, factor, least)
    loss = _measured(
        loss, factor, max(factor * (values.own_error or 0.0), least)
    )  # a mean of the values: its error is at most theirs
    return Comparison(values, loss, tuple(_measured(x, factor, typical) for x in grads))


def _loss(ours: float, plain: float, truth: float | None) -> Difference:
    scalars = [None if x is None else torch.tensor([x], dtype=torch.float64) for x in (ours, plain, truth)]
    assert scalars[0] is not None and scalars[1] is not None
    return _differ("loss", scalars[0], scalars[1], scalars[2])


def _bounded(found: Difference, bound: float) -> Difference:
    return replace(found, bound=bound)


def _measured(found: Difference, factor: float, least: float) -> Difference:
    """Bound by the unmodified model's own error of this tensor, or by ``least`` where that is by luck smaller."""
    assert found.own_error is not None
    few = max(1.0, math.sqrt(FEW / max(found.elements, 1)))
    return _bounded(found, max((LOST_FACTOR if found.is_lost else factor * few) * found.own_error, least))
