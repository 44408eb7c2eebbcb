"""Tokens that a stack counts, and torn groups that it finds in batches of whatever trainer."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import state_of
from torch import Tensor, nn
from trl_runs import model

import augtree_fx
from augtree_fx import CostModel

SAID = "rows of one prompt arrive in different micro-batches: "


@pytest.fixture
def stack() -> nn.Module:
    return augtree_fx.transform(model("llama", torch.float32), costs=CostModel.free(), strict=False).train()


def rows(groups: Sequence[int], seed: int = 0) -> list[Tensor]:
    """A row for each number: the prompt of that group with a response of its own."""
    prompts = torch.randint(3, 259, (64, 24), generator=torch.Generator().manual_seed(9))
    responses = torch.randint(3, 259, (len(groups), 6), generator=torch.Generator().manual_seed(seed))
    return [torch.cat([prompts[group], response]) for group, response in zip(groups, responses, strict=True)]


def train(stack: Any, batches: Sequence[Sequence[Tensor]], step: bool = False) -> None:
    optimizer = torch.optim.SGD(stack.parameters(), lr=1e-3)
    for batch in batches:
        stack(torch.stack(list(batch)), use_cache=False).logits.square().mean().backward()
        if step:
            optimizer.step()


def found(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if SAID in record.getMessage()]


def in_batches(all_rows: list[Tensor], size: int) -> list[list[Tensor]]:
    return [all_rows[i : i + size] for i in range(0, len(all_rows), size)]


def test_torn_groups_are_said_once_and_explained(stack: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    order = [group for _ in range(8) for group in range(4)]  # 4 groups of 8, each micro-batch has one row of each
    train(stack, in_batches(rows(order + [group + 4 for group in order]), 4))
    (message,) = found(caplog)
    assert f"{SAID}1.0 rows a group of 8; call augtree_fx.integrations.trl.enable(trainer)" in message
    assert SAID in str(augtree_fx.explain(stack))


def test_a_single_row_in_each_micro_batch_is_torn_too(stack: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    train(stack, in_batches(rows([0] * 4 + [1] * 4 + [2] * 4 + [3] * 4), 1), step=True)
    (message,) = found(caplog)
    assert f"{SAID}1.0 rows a group of 4" in message


def test_torn_groups_are_said_after_the_first_update(stack: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    """Two rows of each of two groups in a micro-batch, three micro-batches an update."""
    for update in range(2):
        groups = [2 * update, 2 * update + 1] * 6
        batches = in_batches(rows(groups, update), 4)
        train(stack, batches[:2])
        train(stack, batches[2:], step=True)
    (message,) = found(caplog)
    assert f"{SAID}2.0 rows a group of 6" in message


def test_groups_are_torn_also_where_halves_begin_alike(stack: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    """Groups of 8 whose micro-batch of 4 has those rows that begin with the same 20 tokens: half of the group."""
    openings = torch.randint(3, 259, (2, 20), generator=torch.Generator().manual_seed(3))
    batches = [
        [torch.cat([row[:24], openings[half], row[24:]]) for row in rows([group] * 4, 2 * group + half)]
        for group in range(4)
        for half in range(2)
    ]
    train(stack, batches)
    (message,) = found(caplog)
    assert f"{SAID}4.0 rows a group of 8" in message


@pytest.mark.parametrize("step", [False, True])
def test_whole_groups_are_not(stack: nn.Module, caplog: pytest.LogCaptureFixture, step: bool) -> None:
    train(stack, in_batches(rows([group for group in range(8) for _ in range(4)]), 4), step)
    assert found(caplog) == []


def test_whole_groups_below_one_system_prompt_are_not(stack: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    """Two groups of an update, each in its micro-batch, which begin with the same 100 tokens and go on for 48."""
    system = torch.randint(3, 259, (100,), generator=torch.Generator().manual_seed(3))
    prompts = torch.randint(3, 259, (8, 24), generator=torch.Generator().manual_seed(4))
    for update in range(4):
        groups = (2 * update, 2 * update + 1)
        batches = [[torch.cat([system, prompts[group], row]) for row in rows([group] * 4, group)] for group in groups]
        train(stack, batches[:1])
        train(stack, batches[1:], step=True)
    assert found(caplog) == []


def test_prompts_that_come_again_after_an_update_are_not(stack: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    for epoch in range(10):
        train(stack, in_batches(rows([0] * 4 + [1] * 4, epoch), 4), step=True)
    assert found(caplog) == []


def test_empty_rows_belong_to_no_group(stack: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1] = 0
    for seed in range(8):
        stack(torch.stack(rows([seed, seed], seed)), attention_mask=mask, use_cache=False).logits.sum().backward()
        stack(torch.stack(rows([0, 0])), attention_mask=mask * 0, use_cache=False).logits.sum().backward()
    assert found(caplog) == []


def test_a_second_pass_over_the_same_rows_is_not(stack: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    train(stack, in_batches(rows([0, 1, 2, 3]), 1) * 5)
    assert found(caplog) == []


def test_scoring_and_evaluation_are_not_looked_at(stack: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    batches = in_batches(rows([0, 1] * 8), 2)
    with torch.no_grad():
        for batch in batches:
            stack(torch.stack(batch), use_cache=False)
    train(stack.eval(), batches)
    assert found(caplog) == []


def test_tokens_are_counted(stack: nn.Module) -> None:
    shared, alone = torch.stack(rows([0, 0, 0, 0])), torch.stack(rows([1, 2]))
    stack(shared, use_cache=False).logits.sum().backward()
    with torch.no_grad():
        stack(alone, use_cache=False)
        stack.generate(alone, max_new_tokens=3, do_sample=False)
    trained, scored = state_of(stack).trained, state_of(stack).scored
    assert (trained.batches, trained.shared, trained.row_tokens, trained.computed_tokens) == (1, 1, 120, 48)
    assert (scored.batches, scored.shared, scored.row_tokens, scored.computed_tokens) == (1, 0, 60, 60)
    assert (scored + trained).row_tokens == 180 and (trained - trained).batches == 0


def test_original_forwards_are_counted_whatever_the_reason(stack: nn.Module) -> None:
    batch = torch.stack(rows([0, 0, 1, 2]))
    square = torch.ones(4, 1, 30, 30, dtype=torch.bool).tril()
    stack(batch, attention_mask=square, use_cache=False).logits.sum().backward()  # masks of their own are not shared
    stack(batch[2:], use_cache=False).logits.sum().backward()
    stack(batch, use_cache=True).logits.sum().backward()  # no forward of whole rows
    found = state_of(stack).trained
    assert (found.batches, found.shared, found.row_tokens, found.computed_tokens) == (2, 0, 180, 180)
    assert sum(augtree_fx.explain(stack).fallbacks.values()) == 1


def test_groups_are_counted_by_prompts(stack: nn.Module) -> None:
    """Eight rows of one prompt whose halves begin with the same 100 tokens, and two prompts of one row each."""
    openings = torch.randint(3, 259, (2, 100), generator=torch.Generator().manual_seed(3))
    group = [torch.cat([row[:24], openings[i % 2], row[24:]]) for i, row in enumerate(rows([0] * 8))]
    alone = [torch.cat([row[:24], openings[0], row[24:]]) for row in rows([1, 2])]
    batch = torch.nn.functional.pad(torch.stack(group + alone), (3, 0))
    mask = torch.arange(batch.shape[1]).expand_as(batch) >= 3
    for columns in (27, None):
        state_of(stack).prompt_columns = columns
        before = replace(state_of(stack).trained)
        stack(batch, attention_mask=mask, use_cache=False).logits.sum().backward()
        found = state_of(stack).trained - before
        # Without the trainer's word the tree decides: a start of 100 tokens is no opening beside a prompt of 24.
        assert (found.rows, found.groups) == (10, 3 if columns else 4)


def test_a_copy_has_seen_nothing(stack: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    batches = in_batches(rows([group for _ in range(8) for group in range(4)]), 4)
    train(stack, batches[:3])
    twin = copy.deepcopy(stack)
    assert state_of(twin).torn == state_of(twin).torn.fresh() != state_of(stack).torn
    assert state_of(twin).trained == state_of(stack).trained is not state_of(twin).trained
