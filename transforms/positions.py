"""Position ids that are looked up in a table: which ones a token gets by default, and how a packed row gives its own.

Read off the stack's skeleton by value: its forward runs on real token ids and masks, up to the first layer, and every
table says what it was asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from augtree_fx.rows import HostRows, padded_rows, training_rows
from augtree_fx.transforms.classes import base_class
from augtree_fx.transforms.skeleton import built_skeleton, named_layers, stack_function
from augtree_fx.transforms.tracer import CaptureError, is_norm

COLUMNS, MASK, IDS = "columns", "attention mask", "token ids"


@dataclass(frozen=True)
class PositionRule:
    """Positions of tokens that come without any, as the stack counts them, and how it takes others.

    Attributes:
        counts: what is counted: columns, tokens by the attention mask, or tokens by ids (padding is left out).
        first: position of a row's first token.
        padding_id: token id that is not counted, for ``"token ids"``.
        table: name of the module that is told the positions, if the stack's forward takes none.
        ndim: dimensions of the positions that the stack gives it: ``[T]`` or ``[1, T]``.
    """

    counts: str = COLUMNS
    first: int = 0
    padding_id: int = 0
    table: str | None = None
    ndim: int = 2

    def of(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor | None:
        """``[batch, sequence]`` int64 positions by default, ``None`` if they are the columns."""
        if self.counts == COLUMNS and self.first == 0:
            return None
        if self.counts == COLUMNS:
            columns = torch.arange(input_ids.shape[1], device=input_ids.device) + self.first
            return columns.expand(input_ids.shape)
        if self.counts == MASK:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        else:
            mask = input_ids.ne(self.padding_id).long()
        return (mask.cumsum(1) * mask).long() + (self.first - 1)

    def rows(self, input_ids: Any, attention_mask: Tensor | None, position_ids: Tensor | None) -> HostRows:
        """Rows of a batch, with the positions that the stack itself gives them where the caller gives none.

        Raises:
            TypeError, ValueError: as `training_rows`; or the stack's own positions decrease inside a row.
        """
        fits = input_ids.ndim == 2 and (attention_mask is None or attention_mask.shape == input_ids.shape)
        derived = self.of(input_ids, attention_mask) if position_ids is None and fits else None
        if derived is None:
            return training_rows(input_ids, attention_mask, position_ids)
        try:
            return padded_rows(input_ids, attention_mask, derived)
        except ValueError as error:
            raise ValueError(f"{error} (this model counts positions by the {self.counts})") from error


def position_rule(stack: nn.Module) -> PositionRule:
    """How a decoder stack counts positions.

    Raises:
        CaptureError: it cannot be told, or no way is known to hand it the positions of a packed row.
    """
    forward = inspect.unwrap(base_class(stack).forward)
    lists = _lists_of(stack)
    for name, module in stack.named_modules():
        if _holds_layers(name, lists) and {"arange", "cumsum"} & {
            *inspect.unwrap(base_class(module).forward).__code__.co_names
        }:
            raise CaptureError(f"{name} makes position ids of its own")
    takes = "position_ids" in inspect.signature(forward).parameters
    counts = "cumsum" in forward.__code__.co_names
    probe = _Probe(stack) if counts or _tables(stack) else None
    if probe is None or not (counts or probe.tables):  # a rotary embedding may have been replaced by one of any name
        if not takes:
            raise CaptureError("its forward takes no position_ids")
        return PositionRule()
    for name, module in probe.tables.items():
        if (live := base_class(stack.get_submodule(name))) is not base_class(module):
            raise CaptureError(f"{name} was replaced by {live.__name__}, whose positions are not known")
    rule = _matching_rule(probe, padding_id=getattr(stack.config, "pad_token_id", None))
    if takes:
        packed = torch.tensor([[0, 1, 2, 3, 2, 3, 4, 1]]) + rule.first
        for name, positions in probe.looked_up(probe.ids[:1], None, packed).items():
            if positions.ndim != 2 or not torch.equal(positions, packed):
                raise CaptureError(f"{name} is not given the stack's position_ids as they are")
        return rule
    if len(probe.told) != 1:
        raise CaptureError("its forward takes no position_ids, and gives none to a table of positions")
    (table, ndim), *_ = probe.told.items()
    others = probe.looked_up(probe.ids, probe.mask, None).keys() - {table}
    if others:
        raise CaptureError(f"its forward takes no position_ids, and looks up {', '.join(sorted(others))} by them too")
    if rule.counts != COLUMNS:
        raise CaptureError(f"its forward takes no position_ids, and {table} is given them by {rule.counts}")
    return PositionRule(rule.counts, rule.first, rule.padding_id, table, ndim)


def _lists_of(stack: nn.Module) -> set[str]:
    """Names of the lists that hold a stack's layers: one, or one for each inner stack."""
    return {name.rpartition(".")[0] for name, _ in named_layers(stack)}


def _in_layers(name: str, lists: set[str]) -> bool:
    return any(f"{name}.".startswith(f"{x}.") for x in lists)


def _holds_layers(name: str, lists: set[str]) -> bool:
    return bool(name) and any(x.startswith(f"{name}.") for x in lists)


def _tables(stack: nn.Module) -> dict[str, nn.Module]:
    """Modules outside of the layers whose forward takes position ids; rotary embeddings are given them by the stack."""
    lists = _lists_of(stack)
    return {
        name: module
        for name, module in stack.named_modules()
        if name
        and not _in_layers(name, lists)
        and not _holds_layers(name, lists)
        and "RotaryEmbedding" not in type(module).__name__
        and "position_ids" in inspect.signature(inspect.unwrap(base_class(module).forward)).parameters
    }


class _FirstLayer(Exception):
    pass


class _Probe:
    """Runs a skeleton up to its first layer on real token ids; its tables note what they are asked for."""

    ids = torch.tensor([[5, 6, 7, 8, 9, 3, 4, 5], [5, 6, 7, 8, 9, 3, 4, 5], [5, 6, 7, 8, 9, 3, 4, 5]])
    mask = torch.tensor([[1] * 8, [0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]])

    def __init__(self, stack: nn.Module) -> None:
        self._stack = stack
        self._skeleton = built_skeleton(stack)
        self.told: dict[str, int] = {}  # tables that are given position ids, and their dimensions
        self._asked: dict[str, Tensor] = {}
        self._prepare()

    def looked_up(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> dict[str, Tensor]:
        """What each table of positions is asked for: those tables whose index is not one constant."""
        self._asked.clear()
        given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        try:
            stack_function(self._stack, self._skeleton, {})(
                self._skeleton, **given, **({} if positions is None else {"position_ids": positions})
            )
        except _FirstLayer:
            found = {name: index for name, index in self._asked.items() if (index != index.flatten()[0]).any()}
            if not found:
                raise CaptureError("its table of positions is not asked for any") from None
            return found
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError) as error:
            raise CaptureError(f"the position ids that it makes cannot be followed: {error}") from error
        raise CaptureError("its forward does not reach its layers")

    def _prepare(self) -> None:
        skeleton = self._skeleton
        lists, layers = _lists_of(skeleton), named_layers(skeleton)
        live = dict(self._stack.named_buffers())
        for name, buffer in list(skeleton.named_buffers()):
            if not buffer.is_floating_point() and name in live and not _in_layers(name, lists):
                if live[name].is_meta:
                    raise CaptureError(f"{name} is on the meta device; transform the model when it has its weights")
                owner, _, attribute = name.rpartition(".")
                skeleton.get_submodule(owner)._buffers[attribute] = live[name].detach().cpu()
        self.tables = tables = _tables(skeleton)
        embeddings: Any = skeleton.get_input_embeddings
        for name, module in skeleton.named_modules():
            if _in_layers(name, lists):
                continue
            if module is embeddings():
                module.forward = _Zeros(module.embedding_dim)  # type: ignore[assignment]
            elif name in tables:
                module.forward = _Table(name, module, self)  # type: ignore[assignment]
            elif isinstance(module, nn.Embedding):
                module.forward = _Asked(name, module.embedding_dim, self._asked)  # type: ignore[assignment]
            elif isinstance(module, nn.Linear):
                module.forward = _Projected(module.out_features)  # type: ignore[assignment]
            elif is_norm(module) or isinstance(module, nn.modules.dropout._DropoutNd):
                module.forward = _same  # type: ignore[assignment]
        layers[0][1].forward = _stop  # type: ignore[assignment]

    def note(self, name: str, positions: Tensor, ndim: int) -> None:
        """A table was given position ids, or made them; it takes them with so many dimensions."""
        self.told[name] = ndim
        self._asked[name] = positions


def _same(hidden_states: Tensor) -> Tensor:
    return hidden_states


def _stop(*_: Any, **__: Any) -> Tensor:
    raise _FirstLayer


class _Zeros:
    """An embedding of the right shape on the CPU."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, self._width)


class _Projected(_Zeros):
    def __call__(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros(*hidden_states.shape[:-1], self._width)


class _Asked(_Zeros):
    """An embedding that notes its index."""

    def __init__(self, name: str, width: int, asked: dict[str, Tensor]) -> None:
        super().__init__(width)
        self._name, self._all = name, asked

    def __call__(self, ids: Tensor) -> Tensor:
        if self._name in self._all:
            raise CaptureError(f"{self._name} is looked up twice")
        self._all[self._name] = ids
        return super().__call__(ids)


class _Table:
    """A module that takes position ids: notes them, or, given none, runs to the tables inside of it."""

    def __init__(self, name: str, module: nn.Module, probe: _Probe) -> None:
        self._name, self._module, self._probe = name, module, probe
        self._forward: Callable[..., Any] = module.forward
        self._inner = any(isinstance(child, nn.Embedding) for child in list(module.modules())[1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        positions = inspect.signature(self._forward).bind(*args, **kwargs).arguments.get("position_ids")
        if self._inner:
            return self._forward(*args, **kwargs)
        if positions is None:
            positions, ndim = self._own(*args, **kwargs), 1
        else:
            ndim = positions.ndim
        if self._name in self._probe.told and self._name in self._probe._asked:
            raise CaptureError(f"{self._name} is called twice")
        self._probe.note(self._name, positions, ndim)
        width = getattr(self._module, "embedding_dim", None)
        return torch.zeros(1) if width is None else torch.zeros(*positions.shape, width)  # which broadcast

    def _own(self, *args: Any, **kwargs: Any) -> Tensor:
        """The positions that an embedding makes itself, in terms of the ``[T]`` positions that it also takes."""
        if not isinstance(self._module, nn.Embedding):
            raise CaptureError(f"{self._name} makes position ids of its own")
        numbers = torch.arange(self._module.num_embeddings, dtype=torch.float64)[:, None]
        self._module.weight = nn.Parameter(numbers, requires_grad=False)  # each row says its number
        index = self._forward(*args, **kwargs)[..., 0].long()
        given = torch.tensor([0, 1, 2, 3, 2, 3, 4, 1])
        bound = inspect.signature(self._forward).bind(*args, **kwargs).arguments | {"position_ids": given}
        looked_up = self._forward(**bound)[..., 0].long()
        shift = looked_up.flatten()[0]
        if looked_up.ndim != index.ndim or not torch.equal(looked_up.flatten(), given + shift):
            raise CaptureError(f"{self._name} does not take position ids of one row")
        return index - shift


def _matching_rule(probe: _Probe, padding_id: int | None) -> PositionRule:
    """The rule that gives every position that the tables were asked for, with a mask and without, at tokens."""
    cases: list[tuple[Tensor, Tensor | None]] = [(probe.ids, probe.mask), (probe.ids, None)]
    if padding_id is not None:
        padding = probe.ids.clone()
        padding[1, :3] = padding[2, 5:] = padding_id
        padding[0, 2] = padding_id
        cases += [(padding, probe.mask), (padding, torch.ones_like(padding)), (padding, None)]
    seen = [probe.looked_up(ids, mask, None) for ids, mask in cases]
    first = int(next(iter(seen[0].values())).flatten()[0])
    rules = [PositionRule(COLUMNS, first), PositionRule(MASK, first)]
    if padding_id is not None:
        rules.append(PositionRule(IDS, first, padding_id))
    for rule in rules:
        if all(_agrees(rule, *case, looked) for case, looked in zip(cases, seen, strict=True)):
            return rule
    names = ", ".join(seen[0])
    raise CaptureError(f"{names} is asked for positions that are neither columns nor a count of tokens")


def _agrees(rule: PositionRule, ids: Tensor, mask: Tensor | None, looked_up: dict[str, Tensor]) -> bool:
    expected = rule.of(ids, mask)
    expected = torch.arange(ids.shape[1]).expand(ids.shape) if expected is None else expected
    tokens = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    return all(torch.equal(x.expand(ids.shape)[tokens], expected[tokens]) for x in looked_up.values())


class GivenPositions(nn.Module):
    """Stands for a table of positions during one packed call: calls it with the packed row's position ids."""

    def __init__(self, table: nn.Module, position_ids: Tensor) -> None:
        super().__init__()
        self.table, self.position_ids = table, position_ids

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(inspect.unwrap(base_class(self.table).forward)).bind(self.table, *args, **kwargs)
        _, *given = {**bound.arguments, "position_ids": self.position_ids}.items()
        return self.table(**dict(given))


def call_packed(stack: nn.Module, rule: PositionRule, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The stack's original forward (``original(stack, ...)``) on a packed row, whose positions reach its table."""
    if rule.table is None:
        return original(stack, **arguments)
    return _with_table(stack, rule, original, arguments)


def _view(module: nn.Module, path: str, table: nn.Module) -> nn.Module:
    """A copy of a module that shares everything but the child at a path, and what holds that."""
    name, _, rest = path.partition(".")
    view = object.__new__(type(module))
    vars(view).update(vars(module))
    child = _view(module.get_submodule(name), rest, table) if rest else table
    vars(view)["_modules"] = {**module._modules, name: child}
    return view


@torch.compiler.disable
def _with_table(stack: nn.Module, rule: PositionRule, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """A copy of the stack that shares all but the table: the positions are passed, and the stack is not touched."""
    assert rule.table is not None
    given = {name: value for name, value in arguments.items() if name != "position_ids"}
    positions = arguments["position_ids"]
    table = GivenPositions(stack.get_submodule(rule.table), positions[0] if rule.ndim == 1 else positions)
    view = _view(stack, rule.table, table)
    try:
        return original(view, **given)
    finally:  # what a forward notes on itself: that its layers have hooks now
        vars(stack).update({name: value for name, value in vars(view).items() if name != "_modules"})
