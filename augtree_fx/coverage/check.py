"""Check one type: a tiny random model, plain and transformed, on one grouped batch; logits and every gradient."""

from __future__ import annotations

import contextlib
import copy
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import augtree_fx
from augtree_fx import CostModel
from augtree_fx.coverage import tiny
from augtree_fx.coverage.batch import Batch, grouped_batch, objective
from augtree_fx.coverage.kinds import attention_kinds
from augtree_fx.coverage.overrides import NOT_FROM_TOKENS
from augtree_fx.coverage.precision import KeepFloat64
from augtree_fx.transforms import Refusal, find_stack
from augtree_fx.transforms.install import STATE
from augtree_fx.transforms.skeleton import named_layers

EXACT, ORIGINAL, ERROR, SKIPPED = "exact", "original", "error", "skipped"
STATUSES = (EXACT, ORIGINAL, ERROR, SKIPPED)

# Float64 throughout: 2.2e-16 a rounding, a few hundred of them on the way through the layers and back, sums over 200
# tokens. Measured over all types: 1e-13, or up to 1e-10 for gradients that are rounding themselves (see the floor). A
# window that is off by one shows at 1e-3 (tests/test_coverage.py).
FLOAT64 = 1e-9
# Float32: 6e-8 a rounding, otherwise the same. For models that cannot run in float64, of which none is exact so far.
FLOAT32 = 1e-4
# Gradients that are 0 but for rounding (a bias of keys, say) are measured by the largest gradient of the model.
_FLOOR = 1e-6


@dataclass(frozen=True)
class Outcome:
    """What the check of one type found.

    Attributes:
        model_type: key of transformers' causal-LM mapping.
        class_name: the class built.
        status: ``exact``, ``original``, ``error`` or ``skipped``.
        reason: why it is not exact; empty if it is.
        attention: kinds of attention.
        error: largest relative difference of logits and gradients, ``None`` where nothing was compared.
    """

    model_type: str
    class_name: str
    status: str
    reason: str = ""
    attention: tuple[str, ...] = ()
    error: float | None = None

    def record(self) -> dict[str, Any]:
        """For JSON."""
        values = asdict(self)
        values["class"] = values.pop("class_name")
        return values


@dataclass(frozen=True)
class Result:
    """Logits at tokens, and the gradient of every parameter that has one."""

    logits: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Precision:
    """How to run: dtype of the model, whether up-casts keep it, attention of the unmodified model, tolerance.

    With ``default`` the dtype is also torch's default while the model runs.
    """

    dtype: torch.dtype
    keep: bool
    attention: str
    tolerance: float
    default: bool = False

    @property
    def name(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}, {self.attention}"

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype if self.default else before)
        try:
            with KeepFloat64() if self.keep else contextlib.nullcontext():
                yield
        finally:
            torch.set_default_dtype(before)


# The first that the unmodified model runs with is taken. Eager before sdpa: in some versions sdpa drops the soft-cap.
PRECISIONS = (
    Precision(torch.float64, True, "eager", FLOAT64),
    Precision(torch.float64, True, "sdpa", FLOAT64),
    Precision(torch.float64, True, "eager", FLOAT64, default=True),  # forwards that make tensors without a dtype
    Precision(torch.float32, False, "eager", FLOAT32),
    Precision(torch.float32, False, "sdpa", FLOAT32),
)


def check(model_type: str, transform: Callable[..., nn.Module] = augtree_fx.transform) -> Outcome:
    """Check one type. Exceptions are outcomes, too.

    Args:
        model_type: key of transformers' causal-LM mapping.
        transform: what to check in place of `augtree_fx.transform` (tests plant faults here).
    """
    try:
        return _check(model_type, transform)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is reported as an error of this type)
        frames = traceback.extract_tb(error.__traceback__)
        where = [frame for frame in frames if "torch" not in Path(frame.filename).parts][-1]
        reason = f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"
        return Outcome(model_type, tiny.class_name(model_type), ERROR, reason)


def _check(model_type: str, transform: Callable[..., nn.Module]) -> Outcome:
    known = model_type, tiny.class_name(model_type)
    if model_type in NOT_FROM_TOKENS:
        return Outcome(*known, ORIGINAL, NOT_FROM_TOKENS[model_type])
    failures = []
    for precision in PRECISIONS:
        try:
            model = tiny.build(model_type, precision.attention).to(precision.dtype)
            outcome = Outcome(*known, ERROR, "", attention_kinds(model))
            shared = copy.deepcopy(model)  # before it runs: some models keep states of a forward
            config: Any = model.config
            batch = grouped_batch(config.get_text_config(decoder=True).vocab_size)
            plain = run(model, batch, precision)
        except ImportError as error:
            return Outcome(*known, SKIPPED, " ".join(str(error).split()))
        except (ValueError, RuntimeError) as error:  # no such attention, or a dtype is fixed somewhere in the model
            failures.append(f"{precision.name}: {type(error).__name__}: {error}")
            continue
        if all(x.isfinite().all() for x in (plain.logits, *plain.gradients.values())):
            return compare(outcome, shared, plain, batch, precision, transform)
        failures.append(f"{precision.name}: not finite")
    raise RuntimeError("the unmodified tiny model does not run: " + "; ".join(failures))


def run(model: nn.Module, batch: Batch, precision: Precision) -> Result:
    """Forward and backward of a model on a batch."""
    model.zero_grad()
    with precision.scope():
        output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        logits = batch.tokens_of(output.logits)
        objective(logits, batch).backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return Result(torch.cat(logits).detach(), gradients)


def compare(
    outcome: Outcome,
    model: nn.Module,
    plain: Result,
    batch: Batch,
    precision: Precision,
    transform: Callable[..., nn.Module],
) -> Outcome:
    """Transform a model and hold what it computes against the result of the unmodified one."""
    reason = refusal(model, transform)
    if reason:
        return replace(outcome, status=ORIGINAL, reason=reason)
    got = run(model, batch, precision)
    state = getattr(find_stack(model), STATE)
    if state.fallbacks or not state.num_shared:
        return replace(outcome, status=ORIGINAL, reason="; ".join(state.fallbacks) or "nothing was shared")
    name, error = worst(got, plain)
    if error <= precision.tolerance:
        return replace(outcome, status=EXACT, error=error)
    reason = (
        f"{name} differs by {error:.1e} of its largest value, tolerance {precision.tolerance:.0e} ({precision.name})"
    )
    return replace(outcome, reason=reason, error=error)


def refusal(model: nn.Module, transform: Callable[..., nn.Module]) -> str:
    """Transform a model in place; why that is refused, or an empty string."""
    try:
        named_layers(find_stack(model))
    except (NotImplementedError, ValueError) as error:
        return str(error)
    try:
        transform(model, costs=CostModel.free())
    except augtree_fx.RewriteError as error:
        return _summary(error.refusals) or "no attention site was found"
    except NotImplementedError as error:
        return str(error)
    return ""


def _summary(refusals: list[Refusal]) -> str:
    """Refusals, one for each reason, with the first layer that has it and the number of others."""
    by_reason: dict[str, list[Refusal]] = {}
    for item in refusals:
        by_reason.setdefault(re.sub(r"\.\d+", ".*", f"{item.class_name} {item.reason}"), []).append(item)
    parts = [
        str(items[0]).splitlines()[0] + (f" (and {len(items) - 1} more)" if items[1:] else "")
        for items in by_reason.values()
    ]
    return "; ".join(parts)


def worst(got: Result, expected: Result) -> tuple[str, float]:
    """The tensor with the largest error: difference by the largest value expected in it."""
    largest = max((x.abs().max().item() for x in expected.gradients.values()), default=0.0)
    errors = {"logits": _error(got.logits, expected.logits, 0.0)}
    for name in expected.gradients.keys() | got.gradients.keys():
        a, b = got.gradients.get(name), expected.gradients.get(name)
        present = a if a is not None else b
        assert present is not None
        zero = torch.zeros_like(present)
        errors[name] = _error(a if a is not None else zero, b if b is not None else zero, _FLOOR * largest)
    return max(errors.items(), key=lambda item: (item[1] != item[1], item[1]))


def _error(got: Tensor, expected: Tensor, floor: float) -> float:
    if not expected.numel():
        return 0.0
    return ((got - expected).abs().max() / max(expected.abs().max().item(), floor)).item()
