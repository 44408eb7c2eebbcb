"""Attention of a rank's queries to keys that lie on all ranks of a lane, forward and backward: what the ops run.

    ROTATE_KV   keys of every rank go around the ring; each rank's queries attend to what is there
    GATHER_KV   keys of all ranks are gathered, then attended to
    MOVE_Q      queries of responses go to all ranks, which attend for them to their own keys; partials come back.
                Queries of prompts stay, and keys of prompts go around the ring for them

What a rank computes on its own keys runs while the first transfer is under way. Backward hands the global out and LSE
to every call; gradients of keys are summed over ranks in float32. Where keys follow from `Latents`, these travel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from augtree_fx import merge
from augtree_fx import tree_attention as local
from augtree_fx.dtensor_ops import collectives
from augtree_fx.dtensor_ops.collectives import Pending
from augtree_fx.dtensor_ops.schedules import GATHER_KV, MOVE_Q
from augtree_fx.dtensor_ops.tables import KeyCalls, Sizes
from augtree_fx.reference import AttentionSpec, accumulation_dtype
from augtree_fx.tree_attention import Partials, Results, Sum

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Lane:
    """A rank's part of the attention of a lane.

    Attributes:
        own, remote, visiting: calls, see `WholePath`.
        sizes: what moves.
        schedule: one of `schedules.SCHEDULES`.
        group: of the lane.
    """

    own: KeyCalls
    remote: Sequence[KeyCalls]
    visiting: Sequence[KeyCalls]
    sizes: Sizes
    schedule: str
    group: ProcessGroup

    @property
    def rank(self) -> int:
        return distributed.get_rank(self.group)

    @property
    def num_ranks(self) -> int:
        return distributed.get_world_size(self.group)

    @property
    def moves_queries(self) -> bool:
        return self.schedule == MOVE_Q and self.sizes.queries > 0 and self.num_ranks > 1

    @property
    def num_moving_keys(self) -> int:
        """Keys of every rank that travel."""
        return self.sizes.prompt_keys if self.schedule == MOVE_Q else self.sizes.keys

    @property
    def queries(self) -> slice:
        """This rank's queries that travel."""
        return slice(self.sizes.first_query, self.sizes.first_query + self.sizes.own_queries)

    @property
    def others(self) -> list[int]:
        """The other ranks, in the order in which their keys arrive by the ring."""
        return [(self.rank - distance) % self.num_ranks for distance in range(1, self.num_ranks)]


@dataclass(frozen=True)
class Latents:
    """What keys and values follow from, token by token: it travels in their place, and is expanded where it arrives.

    Attributes:
        rows: ``[keys, L]``, of a rank's own keys.
        expand: K ``[t, K, D]`` and V ``[t, K, E]`` of tokens out of their rows ``[t, L]``, differentiable.
        parameters: what else takes gradients by ``expand``, every tensor once.
    """

    rows: Tensor
    expand: Callable[[Tensor], tuple[Tensor, Tensor]]
    parameters: tuple[Tensor, ...]

    @property
    def bytes_per_key(self) -> int:
        return self.rows.shape[1] * self.rows.itemsize

    def unknown_leaves(self, *found: Tensor, rows: Sequence[Tensor]) -> int:
        """How many leaves of a graph, up to some rows, are not parameters: their gradients would be lost."""
        known = {id(x) for x in (*self.parameters, *rows)}
        ends = {x.grad_fn for x in rows}
        seen: set[Any] = set()
        frontier: list[Any] = [x.grad_fn for x in found]
        unknown = 0
        while frontier:
            node = frontier.pop()
            if node is not None and node not in seen and node not in ends:
                seen.add(node)
                leaf = getattr(node, "variable", None)
                unknown += leaf is not None and id(leaf) not in known
                frontier += [before for before, _ in node.next_functions]
        return unknown

    def expanded_again(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Leaf, K and V of rows that visit, in a graph of their own."""
        with torch.enable_grad():
            leaf = rows.detach().requires_grad_()
            k, v = self.expand(leaf)
        unknown = self.unknown_leaves(k, v, rows=[leaf])
        if unknown:
            raise RuntimeError(
                f"{unknown} parameters that make keys of latents were replaced between forward and backward; leave "
                "them in place until backward is over"
            )
        return leaf, k, v

    def gradients(self, leaf: Tensor, kv: Sequence[Tensor], dkv: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of visiting rows and of parameters."""
        given = [gradient.to(x.dtype) for gradient, x in zip(dkv, kv, strict=True)]
        return list(torch.autograd.grad(list(kv), [leaf, *self.parameters], given, allow_unused=True))


class Gradients(NamedTuple):
    """Gradients by what attention was given: those of a rank's own tensors, with what other ranks' queries send there.

    Those of sinks and of the parameters of an expansion are what this rank's queries give, as a parameter's are. The
    own keys' and values' part goes through ``k`` and ``v``, visiting ones' through ``latents`` on their own rank.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    latents: Tensor | None
    parameters: tuple[Tensor | None, ...]


def _settled(compute: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """An error on the way leaves no transfer of the lane behind."""

    @functools.wraps(compute)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        (lane,) = (each for each in (*args, *kwargs.values()) if isinstance(each, Lane))
        with collectives.settled(lane.group):
            return compute(*args, **kwargs)

    return run


@_settled
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lane: Lane,
    sinks: Tensor | None,
    spec: AttentionSpec,
    kernel: str,
    latents: Latents | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a rank's queries.

    Args:
        q: ``[share, H, D]``; k: ``[share, K, D]``; v: ``[share, K, E]``, a rank's own.
        sinks: ``[H]`` or ``None``; they join each query's softmax once.
        latents: what travels in place of k and v.

    Returns:
        ``out [share, H, E]``, ``lse [H, share]``, a rank's own; padding is 0 and -inf.
    """
    arriving = _arriving((k, v) if latents is None else (latents.rows,), lane)
    moved = _gathered_queries(lane, q) if lane.moves_queries else None
    partials = Partials(q, v, _ranges(lane))
    _attend(partials, q, k, v, lane.own, spec, kernel)
    for visitor, calls in zip(arriving, lane.remote, strict=True):
        key, value = visitor if latents is None or not lane.num_moving_keys else latents.expand(*visitor)
        _attend(partials, q, key, value, calls, spec, kernel)
    if moved is not None:
        for part in _from_owners(moved, q, k, v, lane, spec, kernel):
            partials.add(*part)
    return partials.merged(sinks)


@_settled
def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lane: Lane,
    sinks: Tensor | None,
    spec: AttentionSpec,
    kernel: str,
    latents: Latents | None = None,
) -> Gradients:
    """Gradients of `forward`; latents travel again, and are expanded again."""
    dsinks = None if sinks is None else merge.sink_gradient(dout, dlse, out, lse, sinks)
    results = Results(dout, dlse, q, out, lse)
    moving = (k, v) if latents is None else (latents.rows,)
    arriving = _arriving(moving, lane)
    moved = _gathered_results(lane, results) if lane.moves_queries else None
    dq = Sum(q, _ranges(lane))
    totals = _gradients(results, k, v, lane.own, dq, spec, kernel)
    wide = accumulation_dtype(k.dtype)
    dlatents = None if latents is None else latents.rows.new_zeros(latents.rows.shape, dtype=wide)
    dparameters: list[Tensor | None] = [] if latents is None else [None] * len(latents.parameters)

    def contributions() -> Iterator[tuple[Tensor, ...]]:
        for visitor, calls in zip(arriving, lane.remote, strict=True):
            if latents is None:
                key, value = visitor
            else:
                leaf, *expanded = latents.expanded_again(*visitor)
                key, value = expanded[0].detach(), expanded[1].detach()
            found = _gradients(results, key, value, calls, dq, spec, kernel)
            if latents is None:
                yield found
                continue
            dleaf, *others = latents.gradients(leaf, (expanded[0], expanded[1]), found)
            for number, part in enumerate(others):
                dparameters[number] = _added(dparameters[number], part)
            yield (torch.zeros_like(leaf, dtype=wide) if dleaf is None else dleaf.to(wide),)

    if lane.remote and lane.num_moving_keys:
        returned = _sent_home(contributions(), moving, lane)
        for total, part in zip(totals if dlatents is None else [dlatents], returned, strict=True):
            total[: len(part)] += part
    if moved is not None:
        for part in _gradients_from_owners(moved, results, k, v, totals, lane, spec, kernel):
            dq.add(part)
    return Gradients(
        dq.total(),
        totals[0].to(k.dtype),
        totals[1].to(v.dtype),
        dsinks,
        None if latents is None or dlatents is None else dlatents.to(latents.rows.dtype),
        tuple(dparameters),
    )


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """A sum in the accumulation dtype, which starts from nothing."""
    if part is None:
        return total
    part = part.to(accumulation_dtype(part.dtype))
    return part if total is None else total + part


def _attend(
    partials: Partials, q: Tensor, k: Tensor, v: Tensor, calls: KeyCalls, spec: AttentionSpec, kernel: str
) -> None:
    """Put in what the keys of one rank give."""
    partials.add_calls(q, k, v, calls.direct, spec, kernel)
    if calls.gathered:
        key, value = (x.index_select(0, calls.kv_index) for x in (k, v))
        partials.add_calls(q, key, value, calls.gathered, spec, kernel)


def _gradients(
    results: Results, k: Tensor, v: Tensor, calls: KeyCalls, dq: Sum, spec: AttentionSpec, kernel: str
) -> tuple[Tensor, Tensor]:
    """Gradients of the keys and values of one rank, in the accumulation dtype; ``dq`` gets those of queries."""
    dk, dv = local.backward_calls(results, k, v, calls.direct, dq, spec, kernel, wide=True)
    totals = dk.total(), dv.total()
    if calls.gathered:
        key, value = (x.index_select(0, calls.kv_index) for x in (k, v))
        parts = local.backward_calls(results, key, value, calls.gathered, dq, spec, kernel, wide=True)
        for total, part in zip(totals, parts, strict=True):
            total.index_add_(0, calls.kv_index, part.total())
    return totals


def _ranges(lane: Lane) -> list[slice]:
    """Queries of every partial, in the order in which they are put in."""
    calls = [queries for calls in (lane.own, *lane.remote) for queries in calls.q_ranges]
    return calls + [lane.queries] * (lane.num_ranks - 1 if lane.moves_queries else 0)


def _packed(*tensors: Tensor) -> Tensor:
    """One buffer of several tensors, to travel at once."""
    return torch.cat([x.reshape(-1) for x in tensors])


def _unpacked(buffer: Tensor, like: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    parts = buffer.split([math.prod(shape) for shape in like])
    return tuple(part.view(shape) for part, shape in zip(parts, like, strict=True))


def _shapes(moving: Sequence[Tensor], lane: Lane) -> list[tuple[int, ...]]:
    return [(lane.num_moving_keys, *x.shape[1:]) for x in moving]


def _arriving(moving: Sequence[Tensor], lane: Lane) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of the other ranks, the transfer of the first ones being queued now; one row for each key."""
    count = lane.num_moving_keys
    if not lane.remote:
        return iter(())
    if not count:
        return iter([(moving[0].new_empty(0), moving[0].new_empty(0))] * len(lane.remote))
    buffer = _packed(*(x[:count] for x in moving))
    shapes = _shapes(moving, lane)
    if lane.schedule == GATHER_KV:
        return _all_at_once(collectives.gather(buffer, lane.group), shapes)
    return _around(collectives.pass_on(buffer, lane.group), shapes, lane)


def _all_at_once(pending: Pending, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Those of all ranks, one rank's rows after another."""
    found = pending.wait()
    parts = found.split([math.prod(shape) for shape in shapes], dim=1)
    yield tuple(part.reshape(-1, *shape[1:]) for part, shape in zip(parts, shapes, strict=True))


def _around(pending: Pending, shapes: Sequence[tuple[int, ...]], lane: Lane) -> Iterator[tuple[Tensor, ...]]:
    for left in reversed(range(len(lane.remote))):
        buffer = pending.wait()
        if left:
            pending = collectives.pass_on(buffer, lane.group)  # under way while this one is attended to
        yield _unpacked(buffer, shapes)


def _sent_home(contributions: Iterator[tuple[Tensor, ...]], moving: Sequence[Tensor], lane: Lane) -> tuple[Tensor, ...]:
    """Sum over the other ranks of what their queries send to this rank's moving tensors, in float32."""
    shapes = _shapes(moving, lane)
    if lane.schedule == GATHER_KV:
        (parts,) = contributions
        sent = torch.cat([part.reshape(lane.num_ranks, -1) for part in parts], dim=1)
        arrived = collectives.exchange_equal(sent, lane.group).wait()
        return _unpacked(collectives.add_up(torch.zeros_like(sent[0]), arrived, lane.rank), shapes)
    pending: Pending | None = None
    for part in contributions:
        total = _packed(*part)
        if pending is not None:
            total += pending.wait()
        pending = collectives.pass_on(total, lane.group)  # after the keys that it belongs to, one step behind
    assert pending is not None, "a ring has at least one other rank"
    return _unpacked(pending.wait(), shapes)


def _gathered_queries(lane: Lane, *tensors: Tensor) -> list[Pending]:
    """Moving rows of tensors ``[share, ...]`` of all ranks, ``[ranks, queries, ...]`` each, being gathered."""
    found = []
    for tensor in tensors:
        padded = tensor.new_zeros(lane.sizes.queries, *tensor.shape[1:])
        padded[: lane.sizes.own_queries] = tensor[lane.queries]
        found.append(collectives.gather(padded, lane.group))
    return found


def _gathered_results(lane: Lane, results: Results) -> list[Pending]:
    tensors = [results.q, results.dout, results.out, results.lse.T]
    return _gathered_queries(lane, *tensors, *([] if results.dlse is None else [results.dlse.T]))


def _from_owners(
    moved: list[Pending], q: Tensor, k: Tensor, v: Tensor, lane: Lane, spec: AttentionSpec, kernel: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """What each other rank's keys give this rank's moving queries, after this rank's keys gave theirs to others'."""
    (queries,) = (pending.wait() for pending in moved)
    outs = q.new_empty(lane.num_ranks, lane.sizes.queries, q.shape[1], v.shape[-1])
    lses = torch.empty(*outs.shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)
    for peer, calls in zip(lane.others, lane.visiting, strict=True):
        partials = Partials(queries[peer], v, calls.q_ranges)
        _attend(partials, queries[peer], k, v, calls, spec, kernel)
        out, lse = partials.merged(None)
        outs[peer], lses[peer] = out, lse.T
    pending = [collectives.exchange_equal(x, lane.group) for x in (outs, lses)]
    found_outs, found_lses = (x.wait() for x in pending)
    own = lane.sizes.own_queries
    return ((found_outs[peer, :own], found_lses[peer, :own].T) for peer in lane.others)


def _gradients_from_owners(
    moved: list[Pending],
    results: Results,
    k: Tensor,
    v: Tensor,
    totals: Sequence[Tensor],
    lane: Lane,
    spec: AttentionSpec,
    kernel: str,
) -> Iterator[Tensor]:
    """As `_from_owners`, gradients of queries; what visiting queries send to this rank's keys goes to ``totals``."""
    q, dout, out, lse, *dlse = (pending.wait() for pending in moved)
    sent = torch.empty_like(q)
    for peer, calls in zip(lane.others, lane.visiting, strict=True):
        visitor = Results(dout[peer], dlse[0][peer].T if dlse else None, q[peer], out[peer], lse[peer].T.contiguous())
        dq = Sum(q[peer], calls.q_ranges)
        for total, part in zip(totals, _gradients(visitor, k, v, calls, dq, spec, kernel), strict=True):
            total += part
        sent[peer] = dq.total()
    found = collectives.exchange_equal(sent, lane.group).wait()
    return (found[peer, : lane.sizes.own_queries] for peer in lane.others)
