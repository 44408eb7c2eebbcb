"""Host side of waves: plans, parts of a tree and their tables, predictions; and the op of a wave.

Held against rows of (token, position) in plain Python, see row_reference.py, and against attention over all keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from attention_reference import Site, by_rows, leaves_of, make_inputs, packed_prefixes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from row_reference import Batch, packed, padded_batches, prefix_numbers, rollouts
from torch import Tensor
from torch.library import opcheck

from augtree_fx import CostModel, TreeLayout
from augtree_fx.predictions import Predictions, scored_slots
from augtree_fx.tables import Chunks, Span
from augtree_fx.waves import Stage, part_of, plan_waves, token_index

OPS = torch.ops.augtree
SPANS: list[Span] = [None, 3, Chunks(3)]
quick = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def poison_empty_tensors() -> Iterator[None]:
    """Fills every torch.empty with NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def layout_of(rows: list[list[int]]) -> TreeLayout:
    batch = packed(rows)
    return TreeLayout.from_packed(batch.input_ids, batch.position_ids, costs=CostModel.free())


def stages_of(plan: Stage, above: tuple[int, ...] = ()) -> Iterator[tuple[list[int], np.ndarray]]:
    """Each part that is computed: nodes of the stages above it, and its own."""
    if len(plan.nodes):
        yield list(above), plan.nodes
    inside = (*above, *plan.nodes.tolist())
    for wave in plan.waves:
        yield list(inside), wave
    for inner in plan.inner:
        yield from stages_of(inner, inside)


@quick
@given(rollouts(min_tokens=1), st.sampled_from([None, 1, 2, 3, 5, 8, 13]))
def test_plans(rows: list[list[int]], max_tokens: int | None) -> None:
    """Every node is computed once, after its ancestors, with them at hand; waves fit, or are one branch."""
    layout = layout_of(rows)
    plan = plan_waves(layout, max_tokens)
    parts = list(stages_of(plan))
    computed = [int(node) for _, nodes in parts for node in nodes]
    assert sorted(computed) == list(range(layout.num_nodes))
    done: set[int] = set()
    for above, nodes in parts:
        assert (np.diff(nodes) > 0).all() and set(above) <= done
        for node in nodes.tolist():
            parent = int(layout.parent[node])
            assert parent < 0 or parent in above or parent in nodes
        done |= set(nodes.tolist())
    has_children = set(layout.parent.tolist())
    assert plan.nodes.tolist() == [x for x in range(layout.num_nodes) if layout.level[x] == 0 and x in has_children]
    waves = list(plan.walk())
    assert len(waves) <= 1 or max_tokens is not None
    for wave in waves:
        tops = [x for x in wave.tolist() if layout.parent[x] not in wave]
        assert max_tokens is None or len(tops) == 1 or layout.length[wave].sum() <= max_tokens
    for wave in waves:
        if max_tokens is not None and layout.length[wave].sum() > max_tokens:
            assert len(wave) == 1 and wave[0] not in has_children


def test_waves_are_longest_first_and_even() -> None:
    responses = [[list(range(length)) for length in (3, 9, 4, 8, 2, 6)]]
    layout = TreeLayout.from_groups([[1, 2]], responses)
    tokens = [sorted(layout.length[wave].tolist(), reverse=True) for wave in plan_waves(layout, 16).walk()]
    assert tokens == [[9, 4, 3], [8, 6, 2]]
    assert [layout.length[x].sum() for x in plan_waves(layout, 9).walk()] == [9, 8, 8, 7]
    with pytest.raises(ValueError, match="max_wave_tokens must be at least 1, a whole number, got 0"):
        plan_waves(layout, 0)


def test_a_branch_that_does_not_fit_with_its_own_is_a_stage() -> None:
    rows = [[1, 1, 1, 2, 2, 3], [1, 1, 1, 2, 2, 4], [1, 1, 1, 5, 5, 6], [1, 1, 1, 5, 5, 7], [1, 1, 1, 8]]
    layout = layout_of(rows)
    plan = plan_waves(layout, 3)
    assert [x.nodes.tolist() for x in plan.inner] == [[1], [2]] and [x.tolist() for x in plan.waves] == [[3]]
    assert [len(x.waves) for x in plan.inner] == [1, 1]
    assert plan_waves(layout, 4).inner == [] and len(plan_waves(layout, 4).waves) == 3


@quick
@given(rollouts(min_tokens=1), st.sampled_from([1, 3, 8]), st.sampled_from(SPANS))
def test_parts_see_the_keys_that_rows_say(rows: list[list[int]], max_tokens: int, span: Span) -> None:
    """Keys of each query of each part, read off its tables, against the row that the query lies in."""
    layout, batch = layout_of(rows), packed(rows)
    row_of = {slot: (number, place) for number, row in enumerate(batch.slots) for place, slot in enumerate(row)}
    for above, nodes in stages_of(plan_waves(layout, max_tokens)):
        part = part_of(layout, np.concatenate([np.array(above, dtype=np.int64), nodes]))
        tokens = np.concatenate([token_index(layout, np.array(above, dtype=np.int64)), token_index(layout, nodes)])
        assert part.num_rows == 0 and part.source.tolist() == layout.source[tokens].tolist()
        assert part.input_ids.tolist() == layout.input_ids[tokens].tolist()
        tables, first = part.tables(span, len(above)), len(tokens) - int(layout.length[nodes].sum())
        seen: list[list[int]] = [[] for _ in range(len(tokens) - first)]
        for _, causal, q_begin, q_end, k_begin, k_end in tables.segments.tolist():
            for query in range(q_begin, q_end):
                end = k_end - (q_end - 1 - query if causal else 0)
                keys = range(k_begin, end)
                seen[query] += keys if tables.kv_index is None else tables.kv_index[list(keys)].tolist()
        for query, keys in enumerate(seen):
            number, place = row_of[int(part.source[first + query])]
            if isinstance(span, Chunks):
                begin = place - place % span.size
            else:
                begin = 0 if span is None else max(0, place - span + 1)
            if not (isinstance(span, int) and tables.kv_index is not None):  # the kernel's window does the rest
                assert len(keys) == place + 1 - begin
            wanted = rows[number][begin : place + 1]
            assert part.input_ids[sorted(keys)].size >= len(wanted)
            by_position = sorted(keys, key=lambda key: part.position_ids[key])[-len(wanted) :]
            assert part.input_ids[by_position].tolist() == wanted
            assert part.position_ids[by_position].tolist() == list(range(begin, place + 1))


@quick
@given(padded_batches(), st.integers(0, 2**32))
def test_predictions(batch: Batch, seed: int) -> None:
    """Every scored token of every row, and what stands before it in its row."""
    if not any(batch.rows):
        return
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, batch.position_ids, costs=CostModel.free())
    scored = torch.rand(batch.input_ids.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    found = Predictions.of(layout, scored_slots(layout, scored, plan_waves(layout, None).nodes))
    wanted = [
        (row, place, slots[place], batch.rows[row][place - 1], batch.rows[row][place])
        for row, slots in enumerate(batch.slots)
        for place in range(1, len(slots))
        if scored.flatten()[slots[place]]
    ]
    got = [
        (row, index, slot, tuple(token_at(layout, source)), tuple(token_at(layout, target)))
        for row, index, slot, source, target in zip(
            *(x.tolist() for x in (found.row, found.index, found.slot, found.source, found.target)), strict=True
        )
    ]
    assert got == wanted
    every = np.arange(layout.num_tokens)
    assert found.sources_among(every).tolist() == sorted(set(found.source.tolist()))
    assert len(found.inside(every)) == len(wanted) and not len(found.inside(every[:0]))
    assert found.take(np.arange(len(wanted))[::2]).slot.tolist() == [x[2] for x in wanted[::2]]


def token_at(layout: TreeLayout, token: int) -> tuple[int, int]:
    return int(layout.input_ids[token]), int(layout.position_ids[token])


def test_predictions_by_default_are_those_of_responses() -> None:
    layout = TreeLayout.from_groups([[1, 2, 3], [4]], [[[5, 6], [], [7]], [[8]]])
    found = Predictions.of(layout, scored_slots(layout, None, plan_waves(layout, None).nodes))
    assert found.row.tolist() == [0, 0, 2, 3] and found.index.tolist() == [3, 4, 3, 1]
    assert layout.input_ids[found.target].tolist() == [5, 6, 7, 8]
    assert layout.input_ids[found.source].tolist() == [3, 5, 3, 4]
    assert found.scored_nodes(layout).tolist() == [True, True, True, True, True]
    alone = found.take(found.inside(token_index(layout, np.array([2]))))
    assert alone.scored_nodes(layout).tolist() == [True, False, True, False, False]


# The op

BATCH = packed([[1, 1, 2, 3], [1, 1, 2, 4, 5], [1, 1, 6], [7, 7]])
SITES = {
    "grouped": Site(),
    "multi-query": Site(kv_heads=1),
    "value size": Site(head_dim=6, v_head_dim=10),
    "window": Site(window=2),
    "soft-cap": Site(softcap=1.5),
    "sinks": Site(sinks=True, window=3, v_head_dim=4),
}
LAYOUT = layout_of([[token for token, _ in row] for row in BATCH.rows])


def part_in_order() -> tuple[TreeLayout, np.ndarray, int]:
    """The tree with its prompt first, the packed token of each of its own, and how many are the prompt's."""
    prompts = plan_waves(LAYOUT, None).nodes
    others = np.setdiff1d(np.arange(LAYOUT.num_nodes), prompts)
    nodes = np.concatenate([prompts, others])
    return part_of(LAYOUT, nodes), token_index(LAYOUT, nodes), int(LAYOUT.length[prompts].sum())


def wave_arguments(site: Site, dtype: torch.dtype, *, grad: bool = True) -> tuple[Any, ...]:
    part, tokens, first = part_in_order()
    inputs, order = make_inputs(site, BATCH, dtype), packed_prefixes(BATCH, LAYOUT)[tokens]
    q, k, v = (inputs[name][order] for name in "qkv")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    handles = [torch.zeros((), dtype=wide).expand(x[:first].shape).requires_grad_(grad) for x in (k, v)]
    own = [x[first:].clone().requires_grad_(grad) for x in (q, k, v)]
    sinks = inputs["sinks"].requires_grad_(grad) if site.sinks else None
    tables = part.tables(site.window or None, 1)
    spec = (site.scale, site.window, site.softcap, "auto")
    prompts = [x[:first].clone() for x in (k, v)]
    return *own, *prompts, *handles, tables.segments, tables.cu_seqlens, tables.kv_index, sinks, *spec


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float64) for name in SITES), ("sinks", torch.float32)])
def test_opcheck_wave(name: str, dtype: torch.dtype) -> None:
    opcheck(OPS.wave_attention.default, wave_arguments(SITES[name], dtype))


def backward_arguments(arguments: tuple[Any, ...], with_dlse: bool) -> tuple[Any, ...]:
    plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    out, lse = OPS.wave_attention(*plain)
    dlse = torch.randn_like(lse) if with_dlse else None
    return torch.randn_like(out), dlse, *plain[:3], out, lse, *plain[3:5], *plain[7:]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in SITES), ("grouped", torch.float64), ("sinks", torch.float32)],
)
def test_opcheck_wave_backward(name: str, dtype: torch.dtype) -> None:
    for with_dlse in (False, True):
        arguments = backward_arguments(wave_arguments(SITES[name], dtype), with_dlse)
        opcheck(OPS.wave_attention_backward.default, arguments)
        found = OPS.wave_attention_backward(*arguments)
        assert [x.dtype for x in found[3:5]] == [torch.float64 if dtype == torch.float64 else torch.float32] * 2
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in found[1:5])  # none holds another one's memory


@pytest.mark.parametrize("name", SITES)
def test_a_prompt_and_a_wave_are_the_rows(name: str) -> None:
    """Prompt by `replay_attention`, the rest on its keys: outputs, LSE and all gradients are those of the rows."""
    site = SITES[name]
    inputs, (part, tokens, first) = make_inputs(site, BATCH), part_in_order()
    order = packed_prefixes(BATCH, LAYOUT)[tokens]
    leaves = leaves_of(inputs)
    q, k, v = (leaves[key][order] for key in "qkv")
    spec = (leaves.get("sinks"), site.scale, site.window, site.softcap, "reference")
    alone = part_of(LAYOUT, plan_waves(LAYOUT, None).nodes).tables(site.window or None)
    window_alone = site.window if alone.kv_index is not None else 0
    prompt = OPS.replay_attention(
        q[:first],
        k[:first],
        v[:first],
        alone.segments,
        alone.cu_seqlens,
        alone.kv_index,
        spec[0],
        spec[1],
        window_alone,
        *spec[3:],
    )
    handles = [torch.zeros((), dtype=torch.float64).expand(x[:first].shape).requires_grad_() for x in (k, v)]
    tables = part.tables(site.window or None, 1)
    own = OPS.wave_attention(
        q[first:],
        k[first:],
        v[first:],
        k[:first].detach(),
        v[:first].detach(),
        *handles,
        tables.segments,
        tables.cu_seqlens,
        tables.kv_index,
        *spec,
    )
    out, lse = torch.cat([prompt[0], own[0]]), torch.cat([prompt[1], own[1]], dim=1)
    place = torch.empty(len(order), dtype=torch.int64)
    place[order] = torch.arange(len(order))
    rows = place[torch.tensor([number for path in prefix_numbers(BATCH.rows) for number in path])]
    truth = by_rows(site, BATCH, inputs)
    torch.testing.assert_close(out[rows], truth.out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse.T[rows], truth.lse, rtol=1e-12, atol=1e-12)
    loss = (out[rows] * inputs["weigh_out"]).sum() + (lse.T[rows] * inputs["weigh_lse"]).sum()
    loss.backward(retain_graph=True)
    torch.autograd.backward([k[:first], v[:first]], [handle.grad for handle in handles])
    for key, leaf in leaves.items():
        torch.testing.assert_close(leaf.grad, truth.gradients[key], rtol=1e-10, atol=1e-12)
