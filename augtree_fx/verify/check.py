"""The check: transform, see what is shared, run unmodified, run transformed, restore, run in more digits, compare.

One copy of the model is there at a time: it is transformed in place and restored, and cast in place at the very end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from augtree_fx.costs import CostModel
from augtree_fx.explain import Explanation, explain
from augtree_fx.face import RewriteError, restore, transform
from augtree_fx.rows import HostRows
from augtree_fx.transforms import AttentionSite, Refusal, StackState, find_stack, is_installed
from augtree_fx.transforms.install import STATE
from augtree_fx.transforms.live import current_dropout, current_noise
from augtree_fx.transforms.positions import PositionRule
from augtree_fx.transforms.recurrent import MixerSite
from augtree_fx.verify import UsageError, passes
from augtree_fx.verify.batches import Batch, alone, together
from augtree_fx.verify.compare import FACTOR, ROUNDING, Comparison, compare
from augtree_fx.verify.passes import LOSS_SCALE, Outcome, WideCasts

EXACT, DIFFERS, NOT_SHARED = 0, 1, 3
# Where routers flip, a pass has more of it than another by luck: models of 3 layers and 690 tokens gave up to 2.9 times
# the own error, or 0.035 where the other pass had no flip. Missing gradients of a prompt are 0.3 and more.
ROUTED_FACTOR, ROUTED_LEAST = 5.0, 0.1


@dataclass(frozen=True)
class Options:
    """How to check.

    Attributes:
        kernel, strict, costs: as `transform` takes them.
        tolerance: bound of relative differences in place of a measured one.
        warm_ups: passes of either model before the one that counts.
    """

    kernel: str = "auto"
    strict: bool = True
    costs: CostModel | None = None
    tolerance: float | None = None
    warm_ups: int = 1


@dataclass
class Findings:
    """What was found; filled as far as the check gets.

    Attributes:
        explanation: sites, refusals, tree and plan.
        refusals: attention sites that are not rewritten.
        reason: why nothing was shared, or why the comparison says nothing.
        comparison: differences and bounds.
        seconds: of one pass, by ``"unmodified"``, ``"transformed"`` and the truth's dtype.
        truth: dtype of the truth, and how it ran; ``None`` under a given tolerance.
        factor: how many times the own error a bound is.
        notes: what a reader should know.
    """

    explanation: Explanation | None = None
    refusals: tuple[Refusal, ...] = ()
    reason: str = ""
    comparison: Comparison | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    truth: str | None = None
    factor: float = FACTOR
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """Exit status: 0 exact and shared, 1 differs, 3 nothing was shared."""
        if self.comparison is None:
            return NOT_SHARED
        return DIFFERS if self.comparison.failed or self.reason else EXACT


class NotShared(Exception):
    """Nothing is shared; the message says why."""


def check(model: Any, batch: Batch, options: Options) -> Findings:
    """Compare a model with itself, transformed.

    Args:
        model: in evaluation mode. Afterwards it is not transformed; its dtype is that of the truth.
        batch: on the model's device.
        options: how.

    Raises:
        UsageError: the unmodified model cannot run the batch.
    """
    found = Findings()
    try:
        host = _examine(model, batch, options, found)
        plain = _unmodified(model, batch, host, options)
        found.seconds["unmodified"] = plain.seconds
        ours = _shared_pass(model, batch, host, options, found)
    except NotShared as reason:
        found.reason = str(reason)
        return found
    found.seconds["transformed"] = ours.seconds
    truth = None if options.tolerance is not None else _truth(model, batch, host, found)
    what = "log-probs" if passes.scores_tokens(model) else "outputs"
    routed = _is_routed(model.config.get_text_config()) and plain.dtype.itemsize < 4
    if routed and truth is not None:
        found.notes.append(
            f"routed experts in {str(plain.dtype).removeprefix('torch.')}: a token near a tie may take another expert "
            f"in either pass, so the bound is {ROUTED_FACTOR:g} times the own error, {ROUTED_LEAST:g} "
            "at least; --dtype float32 is the sharp check"
        )
    found.factor, least = (ROUTED_FACTOR, ROUTED_LEAST) if routed else (FACTOR, 0.0)
    found.comparison = compare(model, what, ours, plain, truth, found.factor, least, options.tolerance)
    found.reason = _unreliable(found.comparison, plain)
    return found


@contextlib.contextmanager
def _transformed(model: Any, options: Options) -> Iterator[None]:
    """The model transformed for the time being; left alone if it is refused and not strict."""
    transform(model, kernel=options.kernel, costs=options.costs, strict=options.strict)
    try:
        yield
    finally:
        if is_installed(find_stack(model)):
            restore(model)


def _examine(model: Any, batch: Batch, options: Options, found: Findings) -> HostRows:
    """Whether the model is rewritten and the batch shares; raises `NotShared` if not."""
    try:
        with _transformed(model, options):
            found.explanation = explain(model, **batch.inputs())
            found.notes += _training_notes(model)
            rule = getattr(find_stack(model), STATE).positions if found.explanation.transformed else PositionRule()
        host = rule.rows(batch.input_ids, batch.attention_mask, batch.position_ids)
    except RewriteError as error:
        found.refusals = tuple(error.refusals)
        raise NotShared("the model is refused") from error
    except (TypeError, ValueError, NotImplementedError) as error:
        raise NotShared(str(error)) from error
    found.refusals = found.explanation.refusals
    if not found.explanation.transformed:
        raise NotShared("the model is refused, and left unchanged")
    if rule.table is not None and (batch.position_ids is not None or (host.begin % host.shape[1]).any()):
        raise NotShared(
            "the model takes no position_ids, so a row alone has others than in this batch; pad on the right"
        )
    layout, plan = found.explanation.layout, found.explanation.plan
    assert layout is not None
    if not layout.shares:
        hint = "; --share-all shares these too" if "too short" in plan[0].reason else ""
        raise NotShared(f"the batch shares nothing: {plan[0].reason}{hint}")
    if passes.scores_tokens(model) and host.length.max() < 2:
        raise UsageError("--batch: no row has two tokens, so there is no next token to score")
    return host


def _training_notes(model: Any) -> list[str]:
    """What a trainer's model.train() would turn on, and what `transform` then does."""
    stack = find_stack(model)
    if not is_installed(stack):
        return []
    state: StackState = getattr(stack, STATE)
    sites: list[AttentionSite | MixerSite] = [*state.sites, *(mixer for mixer in state.mixers if mixer.attention)]
    rates = [(current_dropout(stack, site), site.name) for site in sites]
    active = [(f"{name}.attention_dropout", rate) for rate, name in rates if rate > 0][:1]
    noise = current_noise(stack)
    active += [noise] if noise is not None and noise[0] not in {f"{x.name}.attention_dropout" for x in sites} else []
    return [
        f"in training {name} is {rate}, which is not shared (strict raises): set it to 0; it is off here"
        for name, rate in active
    ]


def _pass(model: Any, batch: Batch, host: HostRows, warm_ups: int) -> Outcome:
    pieces, tokens = [together(batch, host)], int(host.length.sum())
    dtype = model.dtype
    for _ in range(warm_ups + 1):
        values, loss, seconds = passes.run(model, pieces, tokens, LOSS_SCALE.get(dtype, 1.0))
    return Outcome(values, loss, seconds, passes.harvest(model), dtype)


def _unmodified(model: Any, batch: Batch, host: HostRows, options: Options) -> Outcome:
    try:
        return _pass(model, batch, host, options.warm_ups)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise UsageError(f"the unmodified model cannot run this batch: {type(error).__name__}: {error}") from error


def _shared_pass(model: Any, batch: Batch, host: HostRows, options: Options, found: Findings) -> Outcome:
    """Pass of the transformed model; raises `NotShared` if its original forward ran."""
    with _transformed(model, options):
        try:
            outcome = _pass(model, batch, host, options.warm_ups)
        except (ValueError, NotImplementedError) as error:
            raise NotShared(str(error)) from error
        found.explanation = explain(model, **batch.inputs())
    if found.explanation.num_shared < 1 + options.warm_ups or found.explanation.fallbacks:
        raise NotShared(f"the original forward ran: {'; '.join(found.explanation.fallbacks) or 'without a reason'}")
    return outcome


def _truth(model: Any, batch: Batch, host: HostRows, found: Findings) -> Outcome:
    """The unmodified model in more digits, each row alone; its gradients stay in the parameters."""
    scale = LOSS_SCALE.get(model.dtype, 1.0)
    dtype = torch.float32 if model.dtype in (torch.bfloat16, torch.float16) else torch.float64
    model.to(dtype)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped kernels do not take every dtype
    by_rows = not _rope_looks_at_the_batch(model.config)
    pieces = list(alone(batch, host)) if by_rows else [together(batch, host)]
    with WideCasts() if dtype == torch.float64 else contextlib.nullcontext():
        values, loss, seconds = passes.run(model, pieces, int(host.length.sum()), scale)
    name = str(dtype).removeprefix("torch.")
    found.truth = f"{name}, {'each row alone' if by_rows else 'the whole batch'}"
    found.seconds[name] = seconds
    return Outcome(values, loss, seconds, {}, dtype)


def _is_routed(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))


def _rope_looks_at_the_batch(config: Any) -> bool:
    """RoPE that is scaled by the longest position of a batch gives a row alone another answer."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [x for x in parameters.values() if isinstance(x, dict)]
    return any(x.get("rope_type") in ("dynamic", "longrope") for x in (parameters, *nested))


def _unreliable(comparison: Comparison, plain: Outcome) -> str:
    """Why the measured bound says nothing, if so."""
    if not plain.values.isfinite().all():
        return (
            "the unmodified model gives values that are not finite, so there is nothing to compare with; in float64 "
            "eager attention does that at padding (--attn sdpa)"
        )
    own, lost = comparison.values.own_error, [x for x in comparison.parameters if x.is_lost]
    if own is not None and not own <= ROUNDING[plain.dtype]:
        return (
            f"the unmodified model is {own:.1e} away from its rows alone in more digits, more than rounding explains, "
            "so it gives no bound; try --attn eager, other padding, or --tolerance to compare the two passes alone"
        )
    if 2 * len(lost) > len(comparison.parameters):
        return (
            f"{len(lost)} of {len(comparison.parameters)} gradients of the unmodified model are rounding noise, so "
            "they give no bound; try --dtype float32"
        )
    return ""
