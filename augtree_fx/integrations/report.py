"""What a trainer logs of sharing: tokens before and after, their ratio, and waves, since the last log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from augtree_fx.transforms import StackState, find_stack, is_installed
from augtree_fx.transforms.counts import Counts
from augtree_fx.transforms.install import STATE

TRAINING = ""


def state_of(model: nn.Module) -> StackState | None:
    """Settings and counts of a transformed model; ``None`` of another."""
    stack = find_stack(model)
    return getattr(stack, STATE) if is_installed(stack) else None


class Meter:
    """Adds up the counts of some models, a policy and its reference, say.

    Args:
        models: transformed or not; those that are not count nothing.
        prefix: of the names of metrics.
    """

    def __init__(self, models: Sequence[nn.Module], prefix: str = "augtree/") -> None:
        self._models, self._prefix = list(models), prefix
        self._before = self._totals()
        self._run = TRAINING  # what is counted now
        self._counted: dict[str, tuple[Counts, Counts]] = {}

    @contextlib.contextmanager
    def evaluation(self, name: str) -> Iterator[None]:
        """What runs inside is counted apart, anew, until `take` is called with that name."""
        self._settle()
        self._counted.pop(name, None)
        around, self._run = self._run, name
        try:
            yield
        finally:
            self._settle()
            self._run = around

    def evaluated(self) -> list[str]:
        """Names of evaluations whose metrics nobody took."""
        return [name for name in self._counted if name != TRAINING]

    def take(self, name: str = TRAINING) -> dict[str, float]:
        """Metrics of training, or of an evaluation, since the last call; without batches of a kind, none of that kind.

        ``tokens`` and ``computed_tokens`` are those of forwards with gradients, ``scoring_`` those without (old and
        reference log-probs, evaluation). ``token_ratio`` is the former over the latter. ``rows_per_group`` is the mean
        number of rows of a prompt in shared batches, 1 for a prompt of one row; where the trainer does not say what is
        the prompt, it is what the tree of rows shows, see `augtree_fx.groups`. ``unshared_batches`` ran the original
        forward, since they share nothing or cannot be shared; `augtree_fx.explain` says why. Where ranks pool their
        rows, all but the last are those of the pool.
        """
        self._settle()
        trained, scored = self._counted.pop(name, (Counts(), Counts()))
        return _metrics(trained, self._prefix) | _metrics(scored, f"{self._prefix}scoring_")

    def _settle(self) -> None:
        """Add what was counted meanwhile to what runs now."""
        now = self._totals()
        (trained, scored), (trained_before, scored_before) = now, self._before
        earlier, earlier_scored = self._counted.get(self._run, (Counts(), Counts()))
        self._counted[self._run] = (earlier + trained - trained_before, earlier_scored + scored - scored_before)
        self._before = now

    def _totals(self) -> tuple[Counts, Counts]:
        states = [state for state in map(state_of, self._models) if state is not None]
        return sum((s.trained for s in states), Counts()), sum((s.scored for s in states), Counts())


def _metrics(counts: Counts, prefix: str) -> dict[str, float]:
    if not counts.batches:
        return {}
    grouped = {f"{prefix}rows_per_group": counts.rows / counts.groups} if counts.groups else {}
    return grouped | {
        f"{prefix}tokens": counts.row_tokens,
        f"{prefix}computed_tokens": counts.computed_tokens,
        f"{prefix}token_ratio": counts.row_tokens / max(counts.computed_tokens, 1),
        f"{prefix}unshared_batches": counts.batches - counts.shared,
        f"{prefix}waves": counts.waves,
    }
