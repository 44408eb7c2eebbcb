"""A first plan table: ways to run a batch on one device, costed in FLOPs, with the one that is chosen and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from augtree_fx.costs import CostModel, attention_heads
from augtree_fx.layout import TreeLayout
from augtree_fx.rows import HostRows


@dataclass(frozen=True)
class Candidate:
    """One way to run a batch.

    Attributes:
        name: what is shared.
        tokens: tokens that pass through the layers.
        attention_pairs: (query, key) pairs a head.
        calls: attention kernel calls a layer.
        relative_cost: FLOPs plus the cost of attention pieces, over those of no reuse.
        chosen: whether `transform` runs it.
        reason: why, or why not.
    """

    name: str
    tokens: int
    attention_pairs: int
    calls: int
    relative_cost: float
    chosen: bool
    reason: str


def candidates(host: HostRows, costs: CostModel, config: Any) -> tuple[Candidate, ...]:
    """No reuse, the tree that `transform` builds, and the full prefix tree, costed by one model.

    Args:
        host: rows of the batch.
        costs: cost of an attention piece in tokens.
        config: the decoder's config, for the weight of attention against the rest of a layer.
    """
    chosen = TreeLayout.from_rows(host, costs=costs)
    full = TreeLayout.from_rows(host, costs=CostModel.free())
    pairs = int((host.length * (host.length + 1) // 2).sum())
    pair_tokens = _pair_cost_in_tokens(config)
    base = chosen.num_row_tokens + pairs * pair_tokens
    none = Candidate("no reuse", chosen.num_row_tokens, pairs, 1, 1.0, not chosen.shares, "")
    rows = [none]
    for name, layout in (("tree, nodes that pay", chosen), ("full prefix tree", full)):
        below = [int(layout.length[layout.level > level].sum()) for level in range(layout.num_levels - 1)]
        overhead = sum(costs.piece_tokens(tokens) for tokens in below)
        cost = (layout.num_tokens + layout.num_attention_pairs * pair_tokens + overhead) / base
        calls = layout.tables().num_calls if layout.shares else 1
        rows.append(Candidate(name, layout.num_tokens, layout.num_attention_pairs, calls, cost, False, ""))
    return _explained(rows, chosen, full, costs)


def _pair_cost_in_tokens(config: Any) -> float:
    """FLOPs of one (query, key) pair over those of one token outside attention; 4 and 2 a weight, respectively."""
    heads, head_dim = attention_heads(config)
    intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    weights = config.hidden_size * (4 * heads * head_dim + 3 * intermediate)
    return 4 * heads * head_dim / (2 * weights)


def _explained(rows: list[Candidate], chosen: TreeLayout, full: TreeLayout, costs: CostModel) -> tuple[Candidate, ...]:
    none, tree, trie = rows
    if not chosen.shares:
        saved = none.tokens - full.num_tokens
        reason = f"{saved} tokens could be shared, in runs too short to pay" if saved else "no row shares a prefix"
        return (replace(none, reason=reason),)
    saved = none.tokens - tree.tokens
    tree = replace(tree, chosen=True, reason=f"saves {saved} of {none.tokens} tokens")
    if full.num_nodes == chosen.num_nodes:
        return none, tree
    extra = tree.tokens - trie.tokens
    nodes = full.num_nodes - chosen.num_nodes
    reason = f"{extra} tokens fewer, {nodes} nodes more; a node pays from {costs.node_tokens:.0f} saved tokens"
    return none, tree, replace(trie, reason=reason)
