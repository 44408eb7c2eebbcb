"""The tree layout against rows and a prefix trie in plain Python: what is shared, packed, shown and attended to."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_reference import Batch, bounds, num_distinct, packed, padded, padded_batches, prefix_numbers, rollouts
from torch.overrides import TorchFunctionMode

from augtree_fx import CostModel, TreeLayout
from augtree_fx import tables as tables_module
from augtree_fx.tables import AttentionTables, decode_calls

FREE = CostModel.free()
SEVERAL = settings(max_examples=200, deadline=None, derandomize=True)
SYSTEM, TOOL = [9, 8, 7], [6, 6]
FOUR_LEVELS = [SYSTEM + [task] + TOOL + turn for task in (1, 2) for turn in ([1], [2, 3], [2, 4, 4], [2, 4, 5], [])]


def check_rows(layout: TreeLayout, batch: Batch) -> None:
    """Every row is shown token by token; what rows share agrees on the whole prefix; nothing else is packed."""
    numbers, ids = prefix_numbers(batch.rows), batch.input_ids.reshape(-1)
    prefix_of: dict[int, int] = {}
    for row, slots, path in zip(batch.rows, batch.slots, numbers, strict=True):
        shown = layout.packed_index[slots].tolist() if slots else []
        assert [(int(layout.input_ids[i]), int(layout.position_ids[i])) for i in shown] == row
        for token, number in zip(shown, path, strict=True):
            assert prefix_of.setdefault(token, number) == number
    assert sorted(prefix_of) == list(range(layout.num_tokens))
    assert ids[torch.from_numpy(layout.source)].tolist() == layout.input_ids.tolist()
    padding = np.setdiff1d(np.arange(ids.numel()), [slot for slots in batch.slots for slot in slots])
    assert (layout.packed_index[padding] == -1).all()
    assert layout.num_row_tokens == sum(map(len, batch.rows))


def check_order(layout: TreeLayout) -> None:
    """Level-major, ordered by parent, so that the descendants of a node at any level are neighbours."""
    assert (np.diff(layout.level) >= 0).all() and (layout.length >= 1).all()
    for level in range(layout.num_levels):
        nodes = np.flatnonzero(layout.level == level)
        assert (np.diff(layout.parent[nodes]) >= 0).all()
        below: dict[int, list[int]] = defaultdict(list)
        for node in nodes.tolist():
            path = layout.path(node)
            assert len(path) == level + 1 and layout.path_start[node] == layout.length[path[:-1]].sum()
            for ancestor in path[:-1]:
                below[ancestor].append(node)
        assert all(found == list(range(found[0], found[-1] + 1)) for found in below.values())


def keys_by_query(tables: AttentionTables, window: int | None) -> dict[int, list[int]]:
    """Packed tokens that each packed token attends to, read off the calls."""
    seen: dict[int, list[int]] = defaultdict(list)
    for call in decode_calls(tables.segments, tables.cu_seqlens):
        assert call.cu_q.tolist() == [0] + np.cumsum([s.num_queries for s in call.segments]).tolist()
        assert call.cu_k.tolist() == [0] + np.cumsum([s.num_keys for s in call.segments]).tolist()
        for segment in call.segments:
            for number, query in enumerate(range(segment.q_begin, segment.q_end)):
                last = number + 1 + segment.num_keys - segment.num_queries if call.causal else segment.num_keys
                first = max(last - window, 0) if call.causal and window else 0
                seen[query] += range(segment.k_begin + first, segment.k_begin + last)
    if tables.kv_index is None:
        return seen
    return {query: tables.kv_index[keys].tolist() for query, keys in seen.items()}


def check_attention(layout: TreeLayout, batch: Batch, window: int | None = None) -> None:
    """Each token attends to its own row up to itself, to every key once, to nothing else."""
    tables = layout.tables(window)
    seen = keys_by_query(tables, window)
    if tables.kv_index is not None:  # a window gathers what it reaches, and only where it bites
        assert window < max(map(len, batch.rows))
        assert len(tables.kv_index) == int((layout.length + np.minimum(layout.path_start, window - 1)).sum())
    for slots in batch.slots:
        shown = layout.packed_index[slots].tolist() if slots else []
        for end in range(1, len(shown) + 1):
            visible = shown[max(end - window, 0) : end] if window else shown[:end]
            assert sorted(seen[shown[end - 1]]) == sorted(visible)
    assert sorted(seen) == list(range(layout.num_tokens))


def check(layout: TreeLayout, batch: Batch, *, exact: bool = True) -> None:
    check_rows(layout, batch)
    check_order(layout)
    longest = max(map(len, batch.rows))
    assert layout.tables(max(longest, 1)).kv_index is None
    for window in (None, 1, 3, max(longest - 1, 1)):
        check_attention(layout, batch, window)
    if exact:
        assert layout.num_tokens == num_distinct(batch.rows)


def from_padded(batch: Batch, costs: CostModel = FREE) -> TreeLayout:
    return TreeLayout.from_padded(batch.input_ids, batch.attention_mask, batch.position_ids, costs=costs)


@SEVERAL
@given(padded_batches())
def test_padded_rows(batch: Batch) -> None:
    check(from_padded(batch), batch)


@SEVERAL
@given(rollouts(), st.sampled_from([torch.int32, torch.int64]))
def test_packed_rows(tokens: list[list[int]], dtype: torch.dtype) -> None:
    tokens = [*tokens, [1]]  # empty rows are fine, an empty batch is not
    batch = packed(tokens)
    ids = batch.input_ids.to(dtype)
    check(TreeLayout.from_packed(ids, cu_seq_lens=bounds(tokens), costs=FREE), batch)
    check(TreeLayout.from_packed(ids[0], batch.position_ids[0], bounds(tokens), costs=FREE), batch)
    filled = packed([row for row in tokens if row])  # restarting positions cannot say that a row is empty
    check(TreeLayout.from_packed(filled.input_ids, filled.position_ids, costs=FREE), filled)


@SEVERAL
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), rollouts()), min_size=1, max_size=4))
def test_declared_groups(groups: list[tuple[list[int], list[list[int]]]]) -> None:
    prompts, responses = (list(part) for part in zip(*groups, strict=True))
    batch = packed([prompt + response for prompt, branches in groups for response in branches])
    layout = TreeLayout.from_groups(prompts, responses)
    check(layout, batch, exact=False)
    assert layout.num_tokens == sum(map(len, prompts)) + sum(len(r) for branches in responses for r in branches)


@SEVERAL
@given(padded_batches(), st.integers(0, 12), st.sampled_from([0.0, 0.1, 1.0]))
def test_only_nodes_that_pay_stay(batch: Batch, node_tokens: int, merge_fraction: float) -> None:
    costs = CostModel(node_tokens, merge_fraction)
    layout = from_padded(batch, costs)
    check(layout, batch, exact=False)
    assert num_distinct(batch.rows) <= layout.num_tokens <= layout.num_row_tokens
    paths = [layout.path(node) for node in range(layout.num_nodes)]
    for node in set(layout.parent.tolist()) - {-1}:
        below = sum(int(layout.length[path[-1]]) for path in paths if node in path[:-1])
        saved = int((layout.parent == node).sum() - 1) * int(layout.length[node])
        assert saved >= costs.piece_tokens(below) and saved > 0


@pytest.mark.parametrize(("shared", "num_rows", "kept"), [(9, 2, False), (10, 2, True), (4, 3, False), (5, 3, True)])
def test_threshold(shared: int, num_rows: int, kept: bool) -> None:
    batch = packed([[5] * shared + [number] for number in range(num_rows)])
    layout = TreeLayout.from_packed(batch.input_ids, batch.position_ids, costs=CostModel(10.0, 0.0))
    check(layout, batch, exact=kept)
    assert layout.shares == kept


def test_what_a_node_must_save_grows_with_all_tokens_below_it() -> None:
    """The first node saves 12 of its own, but 340 tokens below would merge one more partial: it must save 34."""
    batch = packed([[5] * 12 + [child] * 50 + [leaf] * 30 for child in (1, 2) for leaf in (3, 4, 6, 7)])
    layout = TreeLayout.from_packed(batch.input_ids, batch.position_ids, costs=CostModel(0.0, 0.1))
    check(layout, batch, exact=False)
    assert layout.num_tokens == 2 * (12 + 50) + 8 * 30


def test_a_node_that_does_not_pay_leaves_its_parent_alone() -> None:
    batch = packed([[5] * 20 + [6] * 3 + [1], [5] * 20 + [6] * 3 + [2], [5] * 20 + [6], [5] * 20 + [7]])
    layout = TreeLayout.from_packed(batch.input_ids, batch.position_ids, costs=CostModel(10.0, 0.0))
    check(layout, batch, exact=False)
    assert layout.num_tokens == 20 + 2 * 4 + 1 and layout.num_levels == 2  # [6] is a prefix of the first dissolved row


@pytest.mark.parametrize("left", [[0] * 10, list(range(10)), [4] * 10])
@pytest.mark.parametrize("positions", ["column", "mask", "offset"])
def test_four_levels_of_turns(left: list[int], positions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = padded(FOUR_LEVELS, left, 24, positions)
    layout = from_padded(batch)
    assert layout.num_levels >= 4 or positions != "mask"
    check(layout, batch)
    monkeypatch.setattr(tables_module, "DENSE_PAIRS", 4)
    check(layout, batch)
    for window in (None, 3):
        tables = layout.tables(window)
        for call in decode_calls(tables.segments, tables.cu_seqlens):
            large = [segment for segment in call.segments if segment.num_queries * segment.num_keys >= 4]
            assert not large or len(call.segments) == 1, "a large segment is a call of its own"


def test_siblings_with_children_are_neighbours() -> None:
    """Fewer gaps between the keys of a level, hence fewer calls: own, and one for each pair of levels."""
    batch = packed([[1, 1] + turn for turn in ([1, 1], [1, 2], [2], [3, 1], [3, 2], [4], [5, 1], [5, 2])])
    layout = TreeLayout.from_packed(batch.input_ids, batch.position_ids, costs=FREE)
    check(layout, batch)
    assert layout.num_levels == 3 and layout.tables().num_calls == 4


def test_long_rows_of_packed_sequences() -> None:
    first, second = packed([[1, 2, 3], [1, 2, 4]]), packed([[1, 2], [1, 2, 3, 4]])
    ids = torch.cat([first.input_ids, second.input_ids])
    positions = torch.cat([first.position_ids, second.position_ids])
    batch = Batch(first.rows + second.rows, first.slots + [[6 + s for s in slots] for slots in second.slots], ids)
    check(TreeLayout.from_packed(ids, positions, costs=FREE), batch)
    check(TreeLayout.from_packed(ids, cu_seq_lens=torch.tensor([0, 3, 6, 8, 12]), costs=FREE), batch)


def test_a_long_row_starts_a_sequence_whatever_its_first_position() -> None:
    ids, positions = torch.tensor([[1, 2], [1, 2]]), torch.tensor([[0, 1], [2, 3]])
    batch = Batch([[(1, 0), (2, 1)], [(1, 2), (2, 3)]], [[0, 1], [2, 3]], ids)
    check(TreeLayout.from_packed(ids, positions, costs=FREE), batch)


@pytest.mark.parametrize("tokens", [[[1, 2, 3]], [[1]], [[1, 2]] * 4, [[], [1], []], [[], []]])
def test_small_batches(tokens: list[list[int]]) -> None:
    batch = padded(tokens, [0] * len(tokens), 4, "mask")
    layout = from_padded(batch)
    check(layout, batch)
    assert layout.shares == (len([row for row in tokens if row]) > 1)


def test_no_mask_means_all_tokens_and_one_row_of_positions_serves_all() -> None:
    ids = torch.tensor([[1, 2, 3], [1, 2, 4]])
    rows = [[(int(token), column) for column, token in enumerate(row)] for row in ids]
    batch = Batch(rows, [[0, 1, 2], [3, 4, 5]], ids)
    check(TreeLayout.from_padded(ids, costs=FREE), batch)
    check(TreeLayout.from_padded(ids, torch.ones(2, 3, dtype=torch.bool), torch.arange(3)[None], costs=FREE), batch)


class _Transfers(TorchFunctionMode):
    """Counts what waits for a device: copies to the host and Python values of tensors. Works on the CPU too."""

    waits = (
        torch.Tensor.cpu,
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__bool__,
        torch.Tensor.nonzero,
        torch.Tensor.__int__,
        torch.Tensor.__index__,
        torch.Tensor.__float__,
        torch.Tensor.__iter__,
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.waits:
            self.found[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def _constructions() -> list[tuple[str, Callable[[], TreeLayout]]]:
    one, many = packed(FOUR_LEVELS), padded(FOUR_LEVELS, [1] * 10, 12, "mask")
    return [
        ("padded", lambda: from_padded(many)),
        ("positions", lambda: TreeLayout.from_packed(one.input_ids, one.position_ids)),
        ("cu_seq_lens", lambda: TreeLayout.from_packed(one.input_ids, one.position_ids, bounds(FOUR_LEVELS))),
    ]


@pytest.mark.parametrize(("name", "construct"), _constructions(), ids=["padded", "positions", "cu_seq_lens"])
def test_one_copy_to_the_host(name: str, construct: Callable[[], TreeLayout]) -> None:
    with _Transfers() as transfers:
        construct()
    copies = {"cpu": 2 if name == "cu_seq_lens" else 1}  # cu_seq_lens has another shape: a copy of its own
    assert transfers.found == copies


def _fastest(work: Callable[[], object], repeats: int = 3) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def test_detection_costs_little_of_what_it_saves() -> None:
    """64 rows of 32k tokens against four layers of width 256; a token is taken to cost what it costs at 2k."""
    from transformers import LlamaConfig, LlamaModel

    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(50_000, (8, 30_000), generator=generator).repeat_interleave(8, 0)
    ids = torch.cat([prompts, torch.randint(50_000, (64, 2_000), generator=generator)], dim=1)
    mask = torch.ones_like(ids)
    layout = TreeLayout.from_padded(ids, mask)
    assert layout.num_tokens <= 8 * 30_000 + 64 * 2_000
    detection_s = _fastest(lambda: TreeLayout.from_padded(ids, mask))
    model = LlamaModel(
        LlamaConfig(vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4)
    )
    with torch.no_grad():
        forward_s = _fastest(lambda: model(ids[:1, :2048] % 1000))
    saved_s = forward_s / 2048 * (layout.num_row_tokens - layout.num_tokens)
    assert detection_s <= 0.02 * saved_s, (
        f"detection {detection_s:.3f} s, saved layers' forward {saved_s:.1f} s, ratio {detection_s / saved_s:.4f}"
    )


def test_a_device_is_that_of_tensors() -> None:
    """`"cuda"`, here `"cpu:0"`, names a device in other words than its tensors do, and is no other one."""
    assert TreeLayout.from_groups([[1]], [[[2]]], device="cpu:0").device == torch.empty(0).device
