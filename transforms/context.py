"""What attention modules are told about a batch's tree: an argument of every layer, a pytree to torch.export."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from augtree_fx.dtensor_ops.site import LaneTables
from augtree_fx.recorder import Recorder
from augtree_fx.tables import AttentionTables, Chunks, Span
from augtree_fx.transforms.expansion import Expansion
from augtree_fx.transforms.path_rows import PathRows


class PromptKV(NamedTuple):
    """K and V of tokens that were computed before, of one attention call of one layer.

    Attributes:
        tensors: K ``[S, K, D]`` and V ``[S, K, E]`` without gradient, and latents ``[S, L]`` where these travel.
        handles: of the same shapes in the accumulation dtype, never read; their gradients are those of the tensors.
    """

    tensors: tuple[Tensor, ...]
    handles: tuple[Tensor, ...]


def continued(own: tuple[Tensor, ...], outer: PromptKV | None) -> tuple[Tensor, ...]:
    """K and V of some tokens, after those of the tokens that they continue; without gradient."""
    tensors = tuple(x.detach() for x in own)
    return tensors if outer is None else tuple(torch.cat(pair) for pair in zip(outer.tensors, tensors, strict=True))


Place = tuple[str, int]  # name of an attention module in its stack, and number of the call in its forward


class Shelf:
    """What belongs to places. No dict or dataclass: FSDP2 rebuilds those around their tensors, which it also casts.

    Attributes:
        items: by place.
        full: whether the forward that fills it is over; what checkpointed layers compute again is not put in.
    """

    def __init__(self, items: dict[Place, Any] | None = None) -> None:
        self.items: dict[Place, Any] = {} if items is None else items
        self.full = False

    def __getitem__(self, place: Place) -> Any:
        return self.items[place]

    def setdefault(self, place: Place, value: Any) -> None:
        """Put a value where there is none.

        Raises:
            NotImplementedError: a module runs more than once in a forward.
        """
        if not self.full and place in self.items:
            raise NotImplementedError(
                f"{place[0]} runs more than once in a forward, each time with other keys, which waves cannot "
                "tell apart; run the batch in one forward"
            )
        self.items.setdefault(place, value)


@dataclass(frozen=True)
class ReplayContext:
    """What attention modules need of a batch's tree; passed to them as an argument, never ambient.

    Attributes:
        tables: attention tables by window (``None`` for the whole path) or chunks.
        one_level: whether the tree has level 0 alone (rows are equal, or prefixes of one another).
        kernel: requested kernel, ``"auto"`` by default.
        columns: ``[T]`` int64 column of each packed token in the caller's rows, where a layer asks for it.
        rows: where packed tokens are in the rows of the tree's paths, where a layer has a recurrent state.
        prompts: `PromptKV` of tokens that were computed before; ``None`` when all tokens are here.
        kept: where attention modules leave K and V of this forward; ``None`` when nobody asks for them.
        lane: tables of this rank's share instead, under context parallelism.
        recorder: takes the times of attention; ``None`` when nobody asks for them.
    """

    tables: Mapping[Span, AttentionTables]
    one_level: bool
    kernel: str
    columns: Tensor | None = None
    rows: PathRows | None = None
    prompts: Shelf | None = None
    kept: Shelf | None = None
    lane: LaneTables | None = None
    recorder: Recorder | None = None

    @property
    def bucket(self) -> tuple[Hashable, ...]:
        """What a compiled model is specialised on: batches of one bucket run one graph, however many tokens they have.

        The windows whose keys have to be gathered, whether there is one level, the kernel, whether prompts were
        computed before, what `PathRows` say, and how a lane moves keys.
        """
        gathered = frozenset(window for window, tables in self.tables.items() if tables.kv_index is not None)
        rows = () if self.rows is None else self.rows.bucket
        lane = () if self.lane is None else self.lane.bucket
        return gathered, self.one_level, self.kernel, self.prompts is not None, *rows, *lane

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> ReplayContext:
        """For layers on another device: the hooks of accelerate move a layer's arguments by this method."""
        moved = {window: tables.to(device, non_blocking) for window, tables in self.tables.items()}
        columns = None if self.columns is None else self.columns.to(device, non_blocking=non_blocking)
        rows = None if self.rows is None else self.rows.to(device, non_blocking)
        same = columns is self.columns and rows is self.rows
        if same and all(moved[window] is tables for window, tables in self.tables.items()):
            return self
        return replace(self, tables=moved, columns=columns, rows=rows)


# Prompts, `kept`, `lane` and `recorder` are constants: wrappers (FSDP2) cast leaves, and watch their gradients.
def _flatten(context: ReplayContext) -> tuple[list[Tensor | None], tuple[Any, ...]]:
    leaves = [x for tables in context.tables.values() for x in (tables.segments, tables.cu_seqlens, tables.kv_index)]
    columns = [] if context.columns is None else [context.columns]
    rows = [] if context.rows is None else context.rows.leaves()
    held = (context.columns is not None, context.rows is not None)
    constants = (context.prompts, context.kept, context.lane, context.recorder)
    return [*leaves, *columns, *rows], (tuple(context.tables), context.one_level, context.kernel, *held, *constants)


def _unflatten(leaves: Iterable[Any], constants: tuple[Any, ...]) -> ReplayContext:
    windows, one_level, kernel, has_columns, has_rows, *others = constants
    flat = list(leaves)
    tables = {window: AttentionTables(*flat[3 * place : 3 * place + 3]) for place, window in enumerate(windows)}
    rest = flat[3 * len(windows) :]
    columns = rest.pop(0) if has_columns else None
    return ReplayContext(tables, one_level, kernel, columns, PathRows(*rest) if has_rows else None, *others)


def _flatten_with_keys(context: ReplayContext) -> tuple[list[tuple[pytree.KeyEntry, Any]], tuple[Any, ...]]:
    leaves, constants = _flatten(context)
    return [(pytree.SequenceKey(place), leaf) for place, leaf in enumerate(leaves)], constants


class GivenHidden:
    """In place of a tree: the stack returns these hidden states, ``[1, n, hidden size]``, for the model's head.

    As `HiddenStates` no dataclass, see `Shelf`; and FSDP2 would take the end of the head's backward for the root's.

    Attributes:
        hidden: what the stack's forward would have computed.
        outputs: class of the stack's outputs, whose other fields a head may read; they are ``None``.
    """

    def __init__(self, hidden: Tensor, outputs: type) -> None:
        self.hidden, self.outputs = hidden, outputs


class HiddenStates:
    """A context that leaves all hidden states here, and gives the model's head one token of them.

    Attributes:
        shared: the context of the tokens.
        found: gets ``[1, T, hidden size]``.
        outputs: gets the class of the stack's outputs.
    """

    def __init__(self, shared: ReplayContext) -> None:
        self.shared = shared
        self.found: list[Tensor] = []
        self.outputs: list[type] = []


@dataclass
class SiteContext:
    """A context as one attention module sees it.

    Attributes:
        shared: the context of the batch.
        site: name of the module in its stack.
        module: the module; expansion: how it makes keys and values, where ranks may send less than these.
    """

    shared: ReplayContext
    site: str
    module: nn.Module | None = None
    expansion: Expansion | None = None


pytree.register_pytree_node(
    ReplayContext,
    _flatten,
    _unflatten,
    serialized_type_name="augtree_fx.ReplayContext",
    to_dumpable_context=list,
    from_dumpable_context=lambda dumped: (
        tuple(Chunks(*span) if isinstance(span, list) else span for span in dumped[0]),
        *dumped[1:],
    ),
    flatten_with_keys_fn=_flatten_with_keys,
)
# An exported program keeps its example inputs, which torch.export.load reads as data.
torch.serialization.add_safe_globals([ReplayContext, AttentionTables, PathRows])
