"""Keys and values that follow, token by token, from a smaller tensor: that is what ranks need to send one another.

    hidden -> kv_a -> norm -> latent -> kv_b -> split -+-> keys      a minimum cut between what attention is given and
    hidden -> kv_a -> rope -> one head -----> expand --+-> values    what it makes of it; behind the cut: the expansion

Found in the graph, not by names: multi-head latent attention of any class, with adapters or quantised weights. Outside
of attention a token's tensors depend on that token alone, which packing relies on already.
"""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

# So many times fewer elements must travel. Expanding 576 elements of DeepSeek-V3 to 40,960 takes 420 FLOP for a byte
# that is not sent, projecting hidden states to multi-head keys 8,000 for half of the bytes; an H200 does 2,300 in the
# time of a byte over NVLink (700 TFLOP/s, 300 GB/s).
MIN_RATIO = 4


@dataclass(frozen=True)
class Cut:
    """Tensors that keys and values of an attention call follow from.

    Attributes:
        names: of their nodes in the captured graph.
        dims: dim of each that counts tokens.
        graph: of the expansion: they are its placeholders, its output is ``(key, value)``, each
            ``[1, heads, tokens, size]``.
        modules: names of the modules and parameters that it uses.
        elements: of them for a token.
        expanded: elements of keys and values for a token.
    """

    names: tuple[str, ...]
    dims: tuple[int, ...]
    graph: fx.Graph = field(repr=False)
    modules: tuple[str, ...]
    elements: int
    expanded: int


def find_cut(graph: fx.Graph, longer: fx.Graph, leaf: fx.Node) -> Cut | None:
    """The smallest tensors that the keys and values of an attention call follow from; ``None`` where that saves little.

    Args:
        graph: a captured graph, with examples.
        longer: the same graph, its examples of another number of tokens.
        leaf: the attention call in ``graph``.
    """
    examples = _Examples(graph, longer, leaf)
    cone = _Cone(graph, (leaf.args[1], leaf.args[2]))  # type: ignore[arg-type]
    if not all(examples.known(node) for node in cone.nodes):
        return None
    cut = _minimum_cut(cone, examples)
    if cut is None:
        return None
    elements = sum(examples.elements(node) for node in cut)
    expanded = sum(examples.elements(node) for node in cone.ends)
    if elements * MIN_RATIO > expanded:
        return None
    expansion = _Expansion(cone, cut, examples)
    if not expansion.build():
        return None
    dims = tuple(examples.token_dim(node) for node in cut)
    names = tuple(node.name for node in cut)
    return Cut(names, dims, expansion.graph, expansion.modules(), elements, expanded)  # type: ignore[arg-type]


class _Examples:
    """What two traces at different numbers of tokens say of a node."""

    def __init__(self, graph: fx.Graph, longer: fx.Graph, leaf: fx.Node) -> None:
        self._other = {node.name: node.meta.get("example") for node in longer.nodes}
        self.num_tokens = leaf.args[1].meta["example"].shape[2]  # type: ignore[union-attr]
        other = next(node for node in longer.nodes if node.name == leaf.name)
        self.num_other = other.args[1].meta["example"].shape[2]

    def of(self, node: fx.Node) -> tuple[Any, Any]:
        return node.meta.get("example"), self._other.get(node.name)

    def known(self, node: fx.Node) -> bool:
        return "example" in node.meta and node.name in self._other

    def depends(self, node: fx.Node) -> bool:
        """Whether a node is, or holds, a tensor whose shape depends on the number of tokens."""
        here, there = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in self.of(node))
        return any(a.shape != b.shape for a, b in zip(here, there, strict=True))

    def token_dim(self, node: fx.Node) -> int | None:
        """The dim that counts tokens; ``None`` where there is not exactly one."""
        here, there = self.of(node)
        if not isinstance(here, Tensor) or not isinstance(there, Tensor) or here.ndim != there.ndim:
            return None
        differ = [dim for dim, (a, b) in enumerate(zip(here.shape, there.shape, strict=True)) if a != b]
        counts = [dim for dim in differ if (here.shape[dim], there.shape[dim]) == (self.num_tokens, self.num_other)]
        return counts[0] if len(counts) == 1 and len(differ) == 1 else None

    def elements(self, node: fx.Node) -> int:
        """Elements of a tensor for a token."""
        return int(self.of(node)[0].numel()) // self.num_tokens


def _in_place(node: fx.Node) -> bool:
    """Whether a node changes a tensor that another node made."""
    target = node.args[0] if node.args else None
    if not isinstance(target, fx.Node) or not isinstance(target.meta.get("example"), Tensor):
        return False
    if node.target is operator.setitem:
        return True
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return name.endswith("_") and not name.endswith("__") and node.op in ("call_method", "call_function")


class _Cone:
    """Nodes that some nodes follow from, in the graph's order; a write to a tensor counts as an input of its maker.

    Attributes:
        ends: the nodes.
        nodes: what they follow from, themselves and the writes included.
    """

    def __init__(self, graph: fx.Graph, ends: tuple[fx.Node, ...]) -> None:
        self.ends = ends
        self._makers: dict[int, fx.Node] = {}
        self.writes: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            example = node.meta.get("example")
            if _in_place(node):
                target: Any = node.args[0]
                self.writes[self._makers[_storage(target.meta["example"])]].append(node)
            elif isinstance(example, Tensor):
                self._makers.setdefault(_storage(example), node)
        found: set[fx.Node] = set()
        frontier = list(ends)
        while frontier:
            node = frontier.pop()
            if node not in found:
                found.add(node)
                frontier += [*node.all_input_nodes, *self.writes[node]]
        self.nodes = [node for node in graph.nodes if node in found]

    def is_written(self, node: fx.Node) -> bool:
        """Whether something is written into the memory of a node's tensor."""
        example = node.meta["example"]
        return isinstance(example, Tensor) and bool(self.writes[self._makers[_storage(example)]])

    def inputs(self, node: fx.Node) -> Iterator[fx.Node]:
        """What a node's value follows from, what is written into it included."""
        yield from node.all_input_nodes
        for write in self.writes[node]:
            yield from (x for x in write.all_input_nodes if x is not write.args[0])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _minimum_cut(cone: _Cone, examples: _Examples) -> list[fx.Node] | None:
    """Tensors through which all tokens flow to the ends, of the fewest elements, as near to the ends as there are.

    A maximum flow by shortest augmenting paths; every node is split into an entry and an exit of its capacity.
    """
    tokens = [node for node in cone.nodes if examples.depends(node) and not _in_place(node)]
    kept, infinite = set(tokens), 1 << 60
    room: dict[Any, dict[Any, int]] = defaultdict(lambda: defaultdict(int))
    for node in tokens:
        cuttable = examples.token_dim(node) is not None and not cone.is_written(node)
        room[node, "in"][node, "out"] = examples.elements(node) if cuttable or node in cone.ends else infinite
        before = [x for x in cone.inputs(node) if x in kept]
        for each in before:
            room[each, "out"][node, "in"] = infinite
        if not before:
            room["source"][node, "in"] = infinite
    for end in cone.ends:
        room[end, "out"]["sink"] = infinite
    while True:
        came = _reached("source", lambda place: (x for x, left in list(room[place].items()) if left > 0))
        if "sink" not in came:
            break
        path = [("sink")]
        while path[-1] != "source":
            path.append(came[path[-1]])
        steps = list(zip(path[1:], path[:-1], strict=True))
        flow = min(room[a][b] for a, b in steps)
        if flow >= infinite:
            return None
        for a, b in steps:
            room[a][b] -= flow
            room[b][a] += flow
    leads = _reached("sink", lambda place: [x for x in list(room) if room[x][place] > 0])
    return [node for node in tokens if (node, "out") in leads and (node, "in") not in leads]


def _reached(start: Any, following: Callable[[Any], Any]) -> dict[Any, Any]:
    """Places that can be reached, with the one before each on a shortest path."""
    came, frontier = {start: start}, deque([start])
    while frontier:
        place = frontier.popleft()
        for other in following(place):
            if other not in came:
                came[other] = place
                frontier.append(other)
    return came


class _Expansion:
    """Builds the graph behind a cut: the nodes of the cone that follow from it, in their order."""

    def __init__(self, cone: _Cone, cut: list[fx.Node], examples: _Examples) -> None:
        self._cone, self._cut, self._examples = cone, cut, examples
        self._dim = examples.token_dim(cut[0])
        self.graph = fx.Graph()
        self._new: dict[fx.Node, Any] = {}

    def build(self) -> bool:
        """Whether all that it takes is there; sizes that come from in front of the cut are put in as numbers."""
        for number, node in enumerate(self._cut):
            self._new[node] = self.graph.placeholder(f"latent_{number}")
        needed = self._needed()
        for node in self._cone.nodes:
            if node in needed and node not in self._new:
                if not all(self._has(each) for each in node.all_input_nodes):
                    continue
                self._new[node] = self.graph.node_copy(node, self._mapped)
        if not all(self._has(node) for node in needed):
            return False
        self.graph.output(tuple(self._new[end] for end in self._cone.ends))
        self.graph.lint()
        return True

    def _needed(self) -> set[fx.Node]:
        """What the ends follow from, up to the cut and to sizes that do not follow from it."""
        behind: set[fx.Node] = set(self._cut)
        for node in self._cone.nodes:
            if node.op != "placeholder" and any(each in behind for each in node.all_input_nodes):
                behind.add(node)
        needed: set[fx.Node] = set()
        frontier = [*self._cone.ends]
        while frontier:
            node = frontier.pop()
            if node not in needed:
                needed.add(node)
                if node not in self._cut and (node in behind or not self._is_size(node)):
                    frontier += [*node.all_input_nodes, *self._cone.writes[node]]
        return needed

    def _is_size(self, node: fx.Node) -> bool:
        """Whether a node is a number: the same for any batch, or the number of tokens."""
        here, there = self._examples.of(node)
        if not isinstance(here, int) or isinstance(here, bool):
            return False
        return here == there or (here, there) == (self._examples.num_tokens, self._examples.num_other)

    def _has(self, node: fx.Node) -> bool:
        return node in self._new or self._is_size(node)

    def _mapped(self, node: fx.Node) -> Any:
        if node not in self._new:
            here, there = self._examples.of(node)
            if here == there:
                return here
            self._new[node] = self.graph.call_method("size", (self._new[self._cut[0]], self._dim))
        return self._new[node]

    def modules(self) -> tuple[str, ...]:
        targets = (str(node.target) for node in self.graph.nodes if node.op in ("call_module", "get_attr"))
        return tuple(dict.fromkeys(targets))
