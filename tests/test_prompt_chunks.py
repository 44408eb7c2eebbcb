"""Prompts as chains of chunks: the same rows, paths and attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_reference import rollouts

from augtree_fx import CostModel, TreeLayout
from augtree_fx.prompt_chunks import split_prompts
from augtree_fx.waves import part_of, plan_waves


def layout_of(rows: list[list[int]]) -> TreeLayout:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return TreeLayout.from_padded(ids, mask, costs=CostModel.free())


@settings(deadline=None)
@given(rollouts(min_tokens=1), st.integers(1, 9))
def test_every_slot_shows_its_token_and_no_prompt_is_longer(rows: list[list[int]], longest: int) -> None:
    layout = layout_of(rows)
    split, chunks = split_prompts(layout, longest)
    assert split.num_tokens == layout.num_tokens and split.num_rows == layout.num_rows
    shown = split.packed_index
    slots = np.flatnonzero(shown >= 0)
    assert np.array_equal(slots, np.flatnonzero(layout.packed_index >= 0))
    for name in ("input_ids", "position_ids"):
        assert np.array_equal(getattr(split, name)[shown[slots]], getattr(layout, name)[layout.packed_index[slots]])
    # Two slots show one token before where they do afterwards.
    pairs = {(a, b) for a, b in zip(layout.packed_index[slots].tolist(), shown[slots].tolist(), strict=True)}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    inner = np.isin(np.arange(split.num_nodes), split.parent)
    assert (split.length[inner & (split.level == 0)] <= longest).all()
    assert (np.diff(split.level) >= 0).all() and (split.parent < np.arange(split.num_nodes)).all()
    below = split.parent >= 0
    assert np.array_equal(split.path_start[below], (split.path_start + split.length)[split.parent[below]])
    assert (split.level[chunks] > 0).all() and len(chunks) == split.num_nodes - layout.num_nodes
    assert split.num_attention_pairs == layout.num_attention_pairs


def test_a_chain() -> None:
    layout = TreeLayout.from_groups([list(range(10))], [[[20, 21], [22]]])
    split, chunks = split_prompts(layout, 4)
    assert chunks.tolist() == [1, 2]
    assert split.length.tolist() == [4, 4, 2, 2, 1] and split.parent.tolist() == [-1, 0, 1, 2, 2]
    assert split_prompts(layout, 10)[0] is layout


def test_three_thousand_chunks() -> None:
    """Deeper than Python recurses: the plan is one stage in another, and one wave below the last."""
    layout, chunks = split_prompts(TreeLayout.from_groups([list(range(3000))], [[[1, 2], [3]]]), 1)
    plan = plan_waves(layout, None, chunks)
    stages = list(plan.stages())
    assert [stage.nodes.tolist() for stage in stages] == [[node] for node in range(3000)]
    assert [wave.tolist() for wave in plan.walk()] == [[3000, 3001]] and stages[-1].waves
    # The last chunk reads all before it at once, as one segment of keys.
    part = part_of(layout, np.arange(3000))
    assert part.tables(None, 2999).segments.tolist() == [[0, 1, 0, 1, 2999, 3000], [1, 0, 0, 1, 0, 2999]]


def test_a_chunk_needs_a_token() -> None:
    with pytest.raises(ValueError, match="max_prompt_tokens must be at least 1, a whole number, got 0"):
        split_prompts(TreeLayout.from_groups([[1, 2]], [[[3]]]), 0)
