"""Weights of a live model, counted parameter by parameter: what no config says of hybrids, experts and adapters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LiveWeights:
    """Numbers of weights.

    Attributes:
        total: all parameters of the model, each once.
        dense: matrices of the decoder that every token passes through, once for each layer that uses them; embeddings,
            norms and biases are left out.
        routed: matrices of routed experts, counted likewise.
    """

    total: int
    dense: int
    routed: int

    @staticmethod
    def of(model: nn.Module, stack: nn.Module, num_experts: int) -> LiveWeights:
        """Count.

        Args:
            model: the whole model.
            stack: its decoder.
            num_experts: routed experts of a layer, 0 without.
        """
        seen: set[int] = set()
        total = 0
        for module in model.modules():
            parameters = {id(each): each.numel() for each in module.parameters(recurse=False)}
            if not parameters.keys() <= seen or not parameters:  # not those of a tied head
                new = sum(number for key, number in parameters.items() if key not in seen)
                total += max(new, _product(module))
            seen |= parameters.keys()
        dense = routed = 0
        for name, module in stack.named_modules(remove_duplicate=False):
            if isinstance(module, nn.Embedding):
                continue
            matrices = [each for each in module.parameters(recurse=False) if each.ndim > 1]
            weights = max(sum(each.numel() for each in matrices), _product(module))
            stacked = any(each.ndim == 3 and each.shape[0] == num_experts for each in matrices)
            if num_experts and (stacked or "experts" in name.split(".")):
                routed += weights
            else:
                dense += weights
        return LiveWeights(total, dense, routed)


def _product(module: nn.Module) -> int:
    """Weights of a linear layer by its sizes, as a quantised one packs them; 0 of anything else, also of wrappers."""
    rows, columns = getattr(module, "out_features", None), getattr(module, "in_features", None)
    if next(module.children(), None) is not None or not isinstance(rows, int) or not isinstance(columns, int):
        return 0
    return rows * columns
