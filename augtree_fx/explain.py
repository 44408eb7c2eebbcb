"""`explain`: what was captured and rewritten, what the batch shares, and what that is expected to cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from tabulate import tabulate
from torch import Tensor, nn

from augtree_fx import kernels
from augtree_fx.costs import attention_heads
from augtree_fx.dtensor_ops.lanes import LanePlan, check_lanes
from augtree_fx.kernels import flash_attn_4, whole_tree
from augtree_fx.kernels.problem import Problem
from augtree_fx.layout import TreeLayout
from augtree_fx.memory import Memory
from augtree_fx.plan import Candidate, candidates
from augtree_fx.planned import PlannedLanes
from augtree_fx.planner import Plan
from augtree_fx.reference import AttentionSpec
from augtree_fx.tables import Calls, decode_calls
from augtree_fx.timings import Timings, timings_of
from augtree_fx.transforms import AttentionSite, Refusal, StackState, capture_stack, find_stack, is_installed
from augtree_fx.transforms.install import STATE
from augtree_fx.transforms.lane_waves import wave_limits
from augtree_fx.transforms.positions import PositionRule, position_rule
from augtree_fx.transforms.recurrent import MixerSite, mixer_sites
from augtree_fx.transforms.requests import estimated_costs, layout_of
from augtree_fx.transforms.wave_budget import WaveBudget


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; ``print`` it.

    Attributes:
        model_name: class of the model.
        transformed: whether the model is transformed.
        sites: captured attention sites.
        refusals: sites that cannot be rewritten, with the reason.
        layout: tree of the given batch, or ``None``.
        plan: ways to run the batch with their costs, the chosen one marked; empty without a batch.
        calls: kernel calls of one layer, in words.
        fallbacks: how often the original forward ran, by reason.
        num_shared: batches that were shared so far.
        mixers: modules with a recurrent or convolution state, which run once for each row.
        torn: groups that arrive in different micro-batches and are not shared for that, in words; or ``None``.
        lanes: which ranks compute which rows under context parallelism; empty without a mesh or a batch. With
            ``rows="pooled"`` of this rank's own rows, as those of others are known in forward alone.
        planned: the planner's plan of the batch, where there is a planner; of the same rows.
        budget: the last choice of the size of waves, in a budget of memory.
        timings: the last step inside of `augtree_fx.measure`, beside its prediction; ``None`` if it was never used.
        memory: the budget that `transform` was given, in which forward chooses the size of waves.
        pooled: whether each rank of a mesh passes rows of its own.
    """

    model_name: str
    transformed: bool
    sites: tuple[AttentionSite, ...]
    refusals: tuple[Refusal, ...]
    layout: TreeLayout | None
    plan: tuple[Candidate, ...]
    calls: tuple[tuple[str, ...], ...]
    fallbacks: dict[str, int]
    num_shared: int
    mixers: tuple[MixerSite, ...] = ()
    torn: str | None = None
    lanes: tuple[LanePlan, ...] = ()
    planned: Plan | None = None
    budget: WaveBudget | None = None
    timings: Timings | None = None
    memory: Memory | None = None
    pooled: bool = False

    def __str__(self) -> str:
        parts = [self._sites()]
        if self.layout is not None:
            parts += [self._tree(self.layout), self._plan(), self._calls()]
        parts += [self._lanes(), str(self.planned) if self.planned else ""]
        parts += [self._history(), str(self.timings) if self.timings else ""]
        return "\n\n".join(part for part in parts if part)

    def _sites(self) -> str:
        state = "transformed" if self.transformed else "not transformed"
        head = f"{self.model_name}: {state}, {len(self.sites)} attention sites captured, {len(self.refusals)} refused"
        counted = Counter(
            (
                site.class_name,
                f"{site.scale:.4g}",
                str(site.span or "-"),
                site.softcap or "-",
                "yes" if site.sinks else "-",
                site.dropout or "-",
            )
            for site in self.sites
        )
        rows: list[tuple[object, ...]] = [
            (*key, number, "rewritten" if self.transformed else "captured") for key, number in counted.items()
        ]
        once_a_row = Counter(mixer.class_name for mixer in self.mixers)
        rows += [(name, "", "", "", "", "", number, "runs once a row") for name, number in once_a_row.items()]
        rows += [(refusal.class_name, "", "", "", "", "", refusal.name, refusal.reason) for refusal in self.refusals]
        headers = ("attention", "scale", "window", "soft-cap", "sinks", "dropout", "layers", "status")
        return head + "\n" + tabulate(rows, headers=headers)

    @staticmethod
    def _tree(layout: TreeLayout) -> str:
        rows = []
        for level in range(layout.num_levels):
            nodes = slice(int(layout.level_begin[level]), int(layout.level_begin[level + 1]))
            length = layout.length[nodes]
            rows.append((level, len(length), int(length.sum()), int(length.min()), int(length.max())))
        groups = len({int(node) for node in layout.row_group if node >= 0})
        head = (
            f"tree: {layout.num_rows} rows in {groups} groups; tokens {layout.num_row_tokens} -> {layout.num_tokens} "
            f"(token ratio {layout.token_ratio:.2f}), attention ratio {layout.attention_ratio:.2f}"
        )
        return head + "\n" + tabulate(rows, headers=("level", "nodes", "tokens", "shortest", "longest"))

    def _plan(self) -> str:
        rows = [
            (
                "->" if item.chosen else "",
                item.name,
                item.tokens,
                item.attention_pairs,
                item.calls,
                f"{item.relative_cost:.3f}",
                item.reason,
            )
            for item in self.plan
        ]
        headers = ("", "plan", "tokens", "attention pairs", "calls a layer", "relative cost", "reason")
        left_out = ", modules that run once a row aside" if self.mixers else ""
        return f"plan{left_out}\n" + tabulate(rows, headers=headers)

    def _calls(self) -> str:
        return "kernel calls of a layer\n" + tabulate(
            self.calls, headers=("window", "queries", "keys", "segments", "mask", "kernel", "passed over")
        )

    def _lanes(self) -> str:
        if not self.lanes or self.layout is None:
            return ""
        rows = [
            (
                _span(lane.ranks),
                len(lane.rows),
                int(self.layout.row_length[list(lane.rows)].sum()),
                (lane.schedule or "by size") + (", long responses cut" if lane.cut else ""),
                lane.prefill_schedule or "the same",
                self._at_a_time(lane.wave_tokens),
            )
            for lane in self.lanes
        ]
        headers = (
            "ranks of the axis",
            "rows",
            "row tokens",
            "schedule",
            "of prompts before waves",
            "branches at a time",
        )
        table = tabulate(rows, headers=headers)
        own = "\nof this rank's own rows: lanes are chosen in forward, for those of all ranks" if self.pooled else ""
        sent = {(site.class_name, site.cut.elements, site.cut.expanded) for site in self.sites if site.cut is not None}
        latents = "".join(
            f"\n{name}: latents travel, {few} elements of a token and layer for {many} of keys and values (not where "
            "their expansion is a unit of FSDP2, nor in compiled graphs)"
            for name, few, many in sorted(sent)
        )
        return f"context parallelism\n{table}{own}{latents}"

    def _at_a_time(self, wave_tokens: int | None) -> str:
        most = "all" if wave_tokens is None else f"{wave_tokens} tokens"
        return most if self.memory is None else f"{most}, or what memory={self.memory!r} holds"

    def _history(self) -> str:
        if not self.transformed:
            return ""
        lines = [f"batches shared so far: {self.num_shared}"]
        if self.budget is not None:
            lines.append(f"last budget of memory: {self.budget}")
        lines += [f"original forward, {number} times: {reason}" for reason, number in self.fallbacks.items()]
        lines += [self.torn] if self.torn else []
        return "\n".join(lines)


def _span(ranks: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def explain(
    model: nn.Module,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Explanation:
    """Say what `transform` does to a model and what a batch shares. Runs no forward and changes nothing.

    Args:
        model: a transformers model, transformed or not.
        input_ids: ``[batch, sequence]``, or ``None`` to look at the model alone.
        attention_mask, position_ids: as passed to the model.

    Raises:
        TypeError, NotImplementedError: not a decoder of transformers.
        ValueError: a batch that cannot be read (see `TreeLayout.from_padded`), or lanes that do not partition it.
    """
    stack = find_stack(model)
    transformed = is_installed(stack)
    state: StackState
    refusals: list[Refusal] = []
    if transformed:
        state = getattr(stack, STATE)
    else:
        sites, refusals = capture_stack(stack)
        rule, mixers = (PositionRule(), ()) if refusals else (position_rule(stack), mixer_sites(stack))
        state = StackState(tuple(sites), positions=rule, mixers=mixers)
    layout: TreeLayout | None = None
    plan: tuple[Candidate, ...] = ()
    calls: tuple[tuple[str, ...], ...] = ()
    lanes: tuple[LanePlan, ...] = ()
    planned: Plan | None = None
    if input_ids is not None:
        host = state.positions.rows(input_ids, attention_mask, position_ids)
        costs = state.costs or estimated_costs(stack, host.device)
        layout = layout_of(stack, state, host)
        plan = candidates(host, costs, stack.config)
        calls = _describe_calls(stack, state, layout)
        if state.lanes is not None:
            choose = state.lanes.choose
            if isinstance(choose, PlannedLanes):  # a copy: timings are of the plan of the last step
                choose = replace(choose)
            chosen = replace(state.lanes, choose=choose).plans(layout)
            planned = choose.last if isinstance(choose, PlannedLanes) else None
            check_lanes(chosen, state.lanes.num_ranks, layout.num_rows)
            limits = wave_limits(chosen, state.max_wave_tokens)
            lanes = tuple(replace(lane, wave_tokens=most) for lane, most in zip(chosen, limits, strict=True))
        elif state.planned is not None:
            planned = replace(state.planned).plan(layout, 1)
    return Explanation(
        model_name=type(model).__name__,
        transformed=transformed,
        sites=state.sites,
        refusals=tuple(refusals),
        layout=layout,
        plan=plan,
        calls=calls,
        fallbacks=dict(state.fallbacks),
        num_shared=state.num_shared,
        mixers=state.mixers,
        torn=state.torn.message,
        lanes=lanes,
        planned=planned,
        budget=state.budget,
        timings=timings_of(model, state),
        memory=state.memory,
        pooled=state.lanes is not None and state.lanes.rows == "pooled",
    )


def _describe_calls(stack: nn.Module, state: StackState, layout: TreeLayout) -> tuple[tuple[str, ...], ...]:
    if not layout.shares or not state.sites:
        return ()
    dtype = next(stack.parameters()).dtype
    if torch.is_autocast_enabled(layout.device.type):
        dtype = torch.get_autocast_dtype(layout.device.type)
    heads, head_dim = attention_heads(stack.config)
    kv_heads = getattr(stack.config, "num_key_value_heads", None) or heads
    one = torch.empty(1, heads, head_dim, dtype=dtype, device=layout.device)
    q, v = one.expand(layout.num_tokens, -1, -1), one[:, :kv_heads].expand(layout.num_tokens, -1, -1)
    rows: list[tuple[str, ...]] = []
    for window, softcap in sorted({(site.span, site.softcap) for site in state.sites}, key=str):
        tables = layout.tables(window)
        bites = window if tables.kv_index is not None else None
        calls, spec = (
            decode_calls(tables.segments, tables.cu_seqlens),
            AttentionSpec(1.0, bites if isinstance(bites, int) else 0, softcap),
        )
        rows += [(str(bites or "-"), *row) for row in _describe_launches(q, v, calls, spec, state.kernel)]
    return tuple(rows)


def _describe_launches(
    q: Tensor, v: Tensor, calls: Calls, spec: AttentionSpec, requested: str
) -> list[tuple[str, ...]]:
    """Queries, keys, segments, mask, kernel, passed over: of one launch for all, where that is chosen, and of calls."""
    why_not = {
        name: kernels.why_not_whole_tree(q, v, calls, spec, requested, speed)
        for name, speed in (("forward", whole_tree.FORWARD), ("backward", whole_tree.BACKWARD))
    }
    together = [name for name, reason in why_not.items() if reason is None]
    apart = [name for name, reason in why_not.items() if reason is not None]
    rows: list[tuple[str, ...]] = []
    if together:
        count = sum(len(call.segments) for call in calls)
        kernel = f"{whole_tree.NAME}{'' if len(together) == 2 else f', {together[0]}'}"
        reason = "; ".join(f"{name} {why_not[name]}" for name in apart)
        rows.append((str(len(q)), str(len(q)), str(count), "tree", kernel, reason))
    for call in calls if apart else ():
        problem = Problem.of(q, v, call, spec)
        choice = kernels.choose(problem, requested)
        passed = "; ".join(f"{name}: {reason}" for name, reason in choice.passed_over if _is_news(name, reason))
        suffix = f", {apart[0]}" if together else ""
        sizes = (problem.num_queries, problem.num_keys, problem.num_segments)
        rows.append((*map(str, sizes), "causal" if call.causal else "none", choice.name + suffix, passed))
    return rows


def _is_news(name: str, reason: str) -> bool:
    """Whether a reader learns from it: not that a CUDA kernel is not for the CPU, nor that one of several is absent."""
    return "it runs on" not in reason and (name == flash_attn_4.NAME or "is not installed" not in reason)
