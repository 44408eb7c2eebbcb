"""Sees whether parameters' gradients are touched by anything but backward, while waves add them up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class GradientWatch:
    """Follows gradients from one accumulation to the next, by object and version.

    Autograd adds to a gradient in place, which raises its version by one. FSDP2 adds to its shards by itself: what it
    shards is not to be followed.

    Args:
        parameters: whose gradients; they have none yet.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._seen: dict[int, tuple[int, int]] = {}  # by parameter: its gradient when last added to, and its version
        self._touched: set[int] = set()
        self._hooks = [each.register_post_accumulate_grad_hook(self._accumulated) for each in parameters]

    def num_touched(self) -> int:
        """Parameters whose gradient was cleared, replaced or changed since an accumulation."""
        for parameter in self._parameters:
            seen, grad = self._seen.get(id(parameter)), parameter.grad
            if seen is not None and (grad is None or seen != (id(grad), grad._version)):
                self._touched.add(id(parameter))
        return len(self._touched)

    def remove(self) -> None:
        """Stop following."""
        for hook in self._hooks:
            hook.remove()

    def _accumulated(self, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        assert grad is not None, "a gradient was accumulated"
        now, before = (id(grad), grad._version), self._seen.get(id(parameter))
        if before is not None and before != (now[0], now[1] - 1):
            self._touched.add(id(parameter))
        self._seen[id(parameter)] = now
