"""What takes part in ``bench step``, and how one contender's step is checked and timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import augtree_fx
from augtree_fx.examples.bench import grpo, grpo_waves, models, timing
from augtree_fx.examples.bench.grpo import Batch, Outcome
from augtree_fx.examples.bench.models import Work
from augtree_fx.examples.bench.shapes import Shape

# Largest difference between ours and no reuse that passes: log-probs in nats, root mean square; gradient norm relative;
# gradients of the sampled matrices relative in norm, the worst of them; or twice what `rounding` finds, where that is
# more. Two bf16 runs of one model differ by the rounding of some ten tensors a layer, half a unit in the last place
# (2^-9) each, which adds up like a random walk: sqrt(10 x 28) 2^-9 = 3e-2 in a matrix's gradient (against float64, 28
# layers of 0.6B: 4e-2, with reuse or without), and in logits, whose std is about 1. Random weights of std 0.02 make
# wider layers multiply a difference by more: 7e-2 in 1.7B at a prompt of 32k, ours and another kernel alike. A matrix
# whose gradient misses the prompt's part or a sibling's is off by 3e-1 or more. float16 has three bits more, float32 as
# many as its last place says, and float64 little more, as norms and RoPE compute in float32.
TOLERANCE = {
    torch.bfloat16: {"log_probs": 5e-2, "grad_norm": 1e-2, "gradients": 1e-1},
    torch.float16: {"log_probs": 1e-2, "grad_norm": 2e-3, "gradients": 2e-2},
    torch.float32: {"log_probs": 1e-5, "grad_norm": 1e-5, "gradients": 1e-4},
    torch.float64: {
        "log_probs": 1e-9,
        "grad_norm": 1e-6,
        "gradients": 1e-9,
    },  # advantages and old log-probs are float32
}
# However much rounding is measured, no more passes: a wrong baseline is no measure of rounding.
MOST = {torch.bfloat16: 2e-1, torch.float16: 1e-1, torch.float32: 1e-3, torch.float64: 1e-4}
OURS = "augtree"
WAVES = "waves"


@dataclass(frozen=True)
class Options:
    """What to measure; see ``--help``."""

    models: list[str]
    checkpointing: list[bool]
    shapes: list[Shape]
    layers: int | None
    dtype: torch.dtype
    device: torch.device
    repeats: int
    kernel: str
    wave_tokens: int | None
    baseline_kernels: list[str]
    time_rows: int | None
    skip: list[str]
    json: str | None

    def timed_rows(self, shape: Shape) -> int:
        """How many rows a micro-batched run goes through."""
        return min(self.time_rows or shape.branches, shape.branches)


@dataclass(frozen=True)
class Contender:
    """One way to run the step.

    Attributes:
        key: ``"augtree"``, ``"waves"``, ``"one-forward"`` or ``"micro-batch"``.
        kernel: of its attention.
        timed_rows: how many rows a micro-batched run times, the rest being as long; all of them otherwise.
        num_rows: rows of the batch.
        wave_tokens: packed tokens of a wave.
    """

    key: str
    kernel: str
    timed_rows: int
    num_rows: int
    wave_tokens: int | None = None

    @property
    def transformed(self) -> bool:
        """Whether it is ours."""
        return self.key in (OURS, WAVES)

    @property
    def name(self) -> str:
        if self.key == OURS:
            return f"augtree, {self.kernel}"
        if self.key == WAVES:
            return f"augtree, waves of {self.wave_tokens}, {self.kernel}"
        if self.key == "one-forward":
            return f"no reuse, {self.kernel}"
        timed = f" ({self.timed_rows} of {self.num_rows} rows timed)" if self.timed_rows < self.num_rows else ""
        return f"no reuse, micro-batch 1, {self.kernel}{timed}"


@dataclass(frozen=True)
class Case:
    """A model, a batch, and how they are run."""

    model: Any
    batch: Batch
    shape: Shape
    checkpointing: bool
    options: Options

    @property
    def check_rows(self) -> int:
        """Rows of the parity gate: as many as a micro-batched run goes through."""
        return self.options.timed_rows(self.shape)

    @property
    def row_work(self) -> Work:
        """What runs without reuse."""
        return Work(self.shape.num_row_tokens, self.shape.row_pairs, self.batch.num_scored)


def of(options: Options, shape: Shape) -> list[Contender]:
    """The contenders of a shape: ours first, then no reuse with each kernel."""
    rows = shape.branches
    found = [Contender(OURS, options.kernel, rows, rows)]
    if options.wave_tokens is not None:
        found.append(Contender(WAVES, options.kernel, rows, rows, options.wave_tokens))
    for kernel in options.baseline_kernels:
        found.append(Contender("one-forward", kernel, rows, rows))
        found.append(Contender("micro-batch", kernel, options.timed_rows(shape), rows))
    return [item for item in found if item.key not in options.skip]


@contextmanager
def prepared(model: Any, contender: Contender) -> Iterator[None]:
    """The model as a contender runs it: transformed for the time being, or with a kernel for its rows."""
    if not contender.transformed:
        models.use_rows_kernel(model, contender.kernel)
        yield
        return
    models.use_rows_kernel(model, "sdpa")
    augtree_fx.transform(model, kernel=contender.kernel)
    try:
        yield
    finally:
        augtree_fx.restore(model)


def draw_batch(model: Any, shape: Shape, options: Options) -> Batch:
    """The batch of a shape; its old log-probs come from a shared pass, which takes the least time."""
    batch = grpo.draw_batch(shape, model.config.vocab_size, options.device)
    with prepared(model, Contender(OURS, options.kernel, shape.branches, shape.branches)):
        return grpo.with_old_logps(batch, model)


def rounding(case: Case) -> dict[str, Any]:
    """How far the unmodified model is from itself when only its attention kernel is another: rounding alone.

    Returns:
        The two kernels, and `Outcome.differences` between them on the rows of the parity gate.
    """
    first = case.options.baseline_kernels[0]
    second = "sdpa" if first != "sdpa" else ("cpu_flash" if case.options.device.type == "cpu" else "aten_flash")
    check, found = case.batch.first(case.check_rows), []
    for kernel in (first, second):
        with prepared(case.model, Contender("micro-batch", kernel, case.check_rows, case.shape.branches)):
            found.append(Outcome.of(case.model, grpo.update(case.model, check, 1)))
    return {"kernels": [first, second], "differences": found[0].differences(found[1])}


def bounds_of(case: Case, rounded: dict[str, float]) -> dict[str, float]:
    """The largest differences that pass, by name."""
    dtype = case.options.dtype
    return {name: min(max(bound, 2 * rounded[name]), MOST[dtype]) for name, bound in TOLERANCE[dtype].items()}


def measure(
    case: Case, contender: Contender, ours: Outcome | None, bounds: dict[str, float]
) -> tuple[dict[str, Any], Outcome]:
    """Run a contender on the rows of the parity gate, compare it with ours, and time it if it passed.

    Returns:
        Figures for its row, and the outcome to compare with.

    Raises:
        RuntimeError: ours shared nothing.
    """
    # Ours is checked on the whole batch that it is timed on, of which the others need to run the first rows only.
    check = case.batch.only(case.check_rows) if contender.transformed else case.batch.first(case.check_rows)
    memory = None
    if contender.wave_tokens is None:
        found = _update(case.model, check, contender)
    else:
        found, memory = grpo_waves.watched_update(case.model, check, contender.wave_tokens)
    outcome = Outcome.of(case.model, found)
    figures: dict[str, Any] = {"work": _work(case, contender), "memory": memory}
    if ours is not None:
        figures["differences"] = outcome.differences(ours)
        figures["passed"] = all(figures["differences"][name] <= bound for name, bound in bounds.items())
        if not figures["passed"]:
            return figures | {"reason": "parity failed"}, outcome
    timed = case.batch.first(contender.timed_rows)
    timing.reset_peak(case.options.device)
    warmups = int(len(timed.input_ids) != len(check.input_ids))  # else the check was one
    time = timing.measure(
        lambda: _update(case.model, timed, contender), case.options.repeats, case.options.device, warmups
    )
    figures["time"] = time.times(contender.num_rows / contender.timed_rows)
    figures["peak_gib"] = timing.peak_gib(case.options.device)
    return figures, outcome


def _update(model: Any, batch: Batch, contender: Contender) -> tuple[Tensor, Tensor]:
    if contender.wave_tokens is not None:
        return grpo_waves.update(model, batch, contender.wave_tokens)
    return grpo.update(model, batch, 1 if contender.key == "micro-batch" else contender.num_rows)


def _work(case: Case, contender: Contender) -> Work:
    """What a contender computes; ours as the layout of its batch says, after a check that it did share."""
    if not contender.transformed:
        return case.row_work
    found = augtree_fx.explain(case.model, input_ids=case.batch.input_ids)
    shared = contender.key == WAVES or found.num_shared  # waves take an explicit layout, or raise
    if found.layout is None or not found.layout.shares or not shared:
        raise RuntimeError(f"nothing was shared; original forwards: {found.fallbacks or 'sharing does not pay here'}")
    return Work(found.layout.num_tokens, found.layout.num_attention_pairs, case.batch.num_scored)
