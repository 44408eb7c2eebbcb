"""What ranks run in tests of faults: a rank that differs, is late, dies, or computes something wrong."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import families
import pytest
import torch
from attention_reference import Site
from cp_workers import attention_errors, averaged, halves, model_and_truth, own_rows, parallel_model, state_of
from row_reference import Batch
from torch import Tensor, distributed

import augtree_fx
from augtree_fx import CostModel, TreeLayout, merge
from augtree_fx.dtensor_ops import attention, schedules
from augtree_fx.dtensor_ops.agreement import HostGroup
from augtree_fx.dtensor_ops.collectives import Pending
from augtree_fx.dtensor_ops.lanes import LanePlan


def swapped_halves(layout: TreeLayout, num_ranks: int) -> list[LanePlan]:
    """As `halves`, and on one rank alone with another schedule."""
    found = halves(layout, num_ranks)
    if distributed.get_rank() == 1:
        found[0] = LanePlan(found[0].ranks, found[0].rows, schedules.GATHER_KV)
    return found


def said(call: Callable[[], Any]) -> str:
    """The error of a call."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


def disagreements() -> dict[str, str]:
    """What each rank is told when rank 1 differs from the others in one thing."""
    differs = distributed.get_rank() == 1
    plain, batch, _ = model_and_truth("llama", 2, "right")

    def run(changes: dict[str, Any], rows: slice = slice(None), other_token: bool = False, **options: Any) -> None:
        model = parallel_model(plain, **(options | (changes if differs else {})))
        ids = batch.input_ids.clone()
        ids[0, 2] += differs and other_token
        rows = rows if differs else slice(None)
        model(input_ids=ids[rows], attention_mask=batch.attention_mask[rows], use_cache=False)

    def without_gradients() -> None:
        with torch.no_grad() if differs else contextlib.nullcontext():
            run({})

    def in_another_dtype() -> None:
        model = parallel_model(plain)
        (model.float() if differs else model)(**batch.inputs(), use_cache=False)

    def another_layout() -> None:
        model = parallel_model(plain)
        mine = batch.input_ids[: 3 if differs else 5]
        layout = TreeLayout.from_padded(mine, torch.ones_like(mine), costs=CostModel.free())
        augtree_fx.pack(model, layout)

    def with_a_cache() -> None:
        model = parallel_model(plain)
        model(**batch.inputs(), use_cache=differs)

    def compiled() -> None:
        model = parallel_model(plain)
        (torch.compile(model, backend="eager") if differs else model)(**batch.inputs(), use_cache=False)

    return {
        "compiled": said(compiled),
        "token": said(lambda: run({}, other_token=True)),
        "shape": said(lambda: run({}, slice(3))),
        "schedule": said(lambda: run({"schedule": "move_q"})),
        "costs": said(lambda: run({"costs": CostModel(3.0, 0.0)})),
        "kernel": said(lambda: run({"kernel": "reference"})),
        "pooled": said(lambda: run({"rows": "pooled"})),
        "lanes": said(lambda: run({"lanes": halves})),
        "plan": said(lambda: run({}, lanes=swapped_halves)),
        "gradients": said(without_gradients),
        "dtype": said(in_another_dtype),
        "cache": said(with_a_cache),
        "layout": said(another_layout),
    }


def prefill_disagreements() -> dict[str, str]:
    """What each rank is told when rank 1 enters `prefill`, or asks for waves, in another way than the others."""
    differs = distributed.get_rank() == 1
    plain, batch, _ = model_and_truth("llama", 2, "right")
    model = parallel_model(plain)
    layout = TreeLayout.from_padded(batch.input_ids, batch.attention_mask, costs=CostModel.free())
    scored = torch.ones_like(batch.input_ids)
    fewer = scored.clone()
    fewer[:, 5] = 0

    def enter(**changes: Any) -> str:
        def run() -> None:
            options = {"max_wave_tokens": 12} | (changes if differs else {})
            with augtree_fx.prefill(model, layout, on_unused="skip", **options) as tree:
                list(tree.waves())

        before = {name: parameter.grad for name, parameter in model.named_parameters()}
        found = said(run)
        kept = all(parameter.grad is before[name] for name, parameter in model.named_parameters())
        assert kept or found == "no error", found
        return found

    return {
        "none": enter(),
        "max_prompt_tokens": enter(max_prompt_tokens=4),
        "activations": enter(activations="recompute"),
        "scored": enter(scored=fewer),
        "max_wave_tokens": enter(max_wave_tokens=1000),
    }


def late(absent: int, seconds: float) -> str:
    """What a rank is told when one never calls forward."""
    plain, batch, _ = model_and_truth("llama", 2, "right")
    model = parallel_model(plain)
    state_of(model).lanes.host = HostGroup(distributed.group.WORLD, timedelta(seconds=seconds))
    if distributed.get_rank() == absent:
        return ""
    return said(lambda: model(**batch.inputs(), use_cache=False))


def dies(folder: Path, schedule: str, victim: int, where: str) -> None:
    """A rank ends in the middle of a forward or a backward; the others write down what they are told, and leave."""
    rank = distributed.get_rank()
    plain, batch, _ = model_and_truth("llama", 2, "right")
    model = parallel_model(plain, schedule=schedule)

    def step() -> None:
        logits = model(**batch.inputs(), use_cache=False).logits
        if where == "backward":
            deadly()
        logits.sum().backward()

    def deadly() -> None:
        if rank == victim:
            patch = mock.patch.object(attention, "_arriving", lambda *_: os._exit(1))
            patch.start()

    if where == "forward":
        deadly()
    (folder / str(rank)).write_text(said(step))
    os._exit(0)  # as a trainer that got an error, which ends what others may wait for


def small_errors() -> dict[str, float]:
    """Batches with fewer tokens than ranks, of one row, or of rows that are one another's beginning; all work."""
    plain = model_and_truth("llama", 2, "right")[0]
    errors = {}
    for name, lengths in {"three tokens": (3,), "a row": (9,), "a row twice": (3, 3), "beginnings": (2, 5, 7)}.items():
        batch = families.padded([[torch.arange(3, 3 + length)] for length in lengths], "right")
        truth = families.reference(plain, batch)
        for schedule in schedules.SCHEDULES:
            got = averaged(families.computed(parallel_model(plain, schedule=schedule), batch))
            errors[f"{name}, {schedule}"] = max(families.errors(got, truth).values())
    return errors


def without_rows_errors() -> tuple[dict[str, float], str]:
    """One rank has no rows of its own, and computes a share of the others'; then what is said where nobody has any."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    idle = rank == ranks - 1
    plain, batch, _ = model_and_truth("llama", 2, "right")
    parts = [own_rows(batch, each, ranks - 1, lonely=False) for each in range(ranks - 1)]
    results = [families.reference(plain, part) for part in parts]
    means = {name: sum(each.gradients[name] for each in results) / ranks for name in results[0].gradients}
    part = parts[0 if idle else rank]
    given = {name: each[:0] if idle else each for name, each in part.inputs().items()}
    model = parallel_model(plain, rows="pooled")
    logits = model(**given, use_cache=False).logits
    if idle:
        assert logits.shape == (0, batch.input_ids.shape[1], plain.config.vocab_size)
        logits.sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        got = families.Result(results[0].logits, gradients)
    else:
        got = families.result_of(model, part.rows_of(logits), part)
    expected = families.Result(results[0 if idle else rank].logits, means)
    errors = families.errors(averaged(got), expected)
    try:
        model(**{name: each[:0] for name, each in given.items()}, use_cache=False)
    except ValueError as error:
        return errors, str(error)
    return errors, "no error"


def lanes_errors(given: Any) -> tuple[str, str]:
    """What a forward and `explain` say when the caller's function gives no lanes."""
    plain, batch, _ = model_and_truth("llama", 2, "right")
    model = parallel_model(plain, lanes=lambda *_: given)
    with pytest.raises(ValueError) as of_forward:
        model(**batch.inputs(), use_cache=False)
    with pytest.raises(ValueError) as of_explain:
        augtree_fx.explain(model, batch.input_ids, batch.attention_mask)
    return str(of_forward.value), str(of_explain.value)


def errors_after_an_error(schedule: str) -> dict[str, float]:
    """Every rank has an error between transfers of a forward, then of a backward; each time the next step is right."""
    plain, batch, truth = model_and_truth("llama", 2, "right")
    model = parallel_model(plain, schedule=schedule)
    smaller = {name: each[:3] for name, each in batch.inputs().items()}  # less is under way than the next step sends
    errors = {}

    def late(*arguments: Any) -> Any:
        """One rank sends when the one after it has had its error."""
        time.sleep(0.3 * (distributed.get_rank() == 1))
        return _ARRIVING(*arguments)

    for name in ("_attend", "_gradients"):
        answers = [mock.DEFAULT, RuntimeError("out of memory")]  # own keys are attended to, those that arrive are not
        failing = mock.patch.object(attention, name, wraps=getattr(attention, name), side_effect=answers)
        with failing, mock.patch.object(attention, "_arriving", late):
            assert "out of memory" in said(lambda: model(**smaller, use_cache=False).logits.sum().backward())
        model.zero_grad()
        errors[name] = max(families.errors(averaged(families.computed(model, batch)), truth).values())
    return errors


# Some ranks have the group of their lane from an earlier partition, others need a new one.
PARTITIONS = ([[0], [1], [2]], [[0, 1], [2]], [[0], [1, 2]], [[0, 2], [1]], [[0, 1, 2]])


def partition_errors() -> dict[str, float]:
    """A model in lanes that change, in a world whose groups are not on all ranks, or gone."""
    if distributed.get_rank() < 2:  # as frameworks make groups: by their members alone
        distributed.new_group([0, 1], use_local_synchronization=True)
    gone = distributed.new_group([0, 1, 2])
    plain, batch, truth = model_and_truth("llama", 2, "right")
    model = parallel_model(plain)
    errors = {}
    for partition in PARTITIONS:

        def choose(layout: TreeLayout, num_ranks: int, partition: list[list[int]] = partition) -> list[LanePlan]:
            rows = torch.arange(layout.num_rows).tensor_split(len(partition))
            lanes = zip(partition, rows, strict=True)
            return [LanePlan(tuple(ranks), tuple(some.tolist()), schedules.ROTATE_KV) for ranks, some in lanes]

        state_of(model).lanes.choose = choose
        model.zero_grad()
        errors[str(partition)] = max(families.errors(averaged(families.computed(model, batch)), truth).values())
    distributed.destroy_process_group(gone)  # torch would name the next group as it named an earlier one
    again = parallel_model(plain, lanes=halves)
    errors["another model"] = max(families.errors(averaged(families.computed(again, batch)), truth).values())
    return errors


_ARRIVING, _WAIT, _MERGE, _SENT_HOME = attention._arriving, Pending.wait, merge.partial_softmax, attention._sent_home
_BACKWARD = attention.backward


def _stale_keys(*arguments: Any) -> tuple[Tensor, ...]:
    """Backward is sent other keys than forward was, as if an optimiser step had come between."""
    with mock.patch.object(attention, "_arriving", lambda kv, lane: _ARRIVING((0.9 * kv[0], kv[1]), lane)):
        return _BACKWARD(*arguments)


def _without_the_last_step(kv: tuple[Tensor, ...], lane: attention.Lane) -> Iterator[tuple[Tensor, ...]]:
    """The last keys of the ring are those of the step before."""
    found = list(_ARRIVING(kv, lane))
    return iter([*found[:-1], found[-2]])


def _of_another_rank(pending: Pending) -> Tensor:
    """LSEs ``[ranks, queries, H]`` of the others arrive one rank further; all else has more dims.

    What is in a rank's own row may be anything, NaN too, and stays there.
    """
    found = _WAIT(pending)
    if found.ndim == 3:
        others = [peer for peer in range(len(found)) if peer != distributed.get_rank(pending.group)]
        found[others] = found[others[1:] + others[:1]]
    return found


def _sinks_in_every_partial(outs: Any, lses: Any, sinks: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    if sinks is not None and len(outs) > 1:
        merged = [_MERGE([out], [lse], sinks) for out, lse in zip(outs, lses, strict=True)]
        outs, lses = ([*x] for x in zip(*merged, strict=True))
    return _MERGE(outs, lses, sinks, **options)


def _lost_on_the_last_rank(*arguments: Any) -> tuple[Tensor, ...]:
    """What other ranks' queries send to its keys."""
    found = _SENT_HOME(*arguments)
    last = distributed.get_rank() == distributed.get_world_size() - 1
    return tuple(torch.zeros_like(x) for x in found) if last else found


# What is replaced, by what, and the schedule.
PLANTED: dict[str, tuple[Any, str, Any, str]] = {
    "stale keys in backward": (attention, "backward", _stale_keys, schedules.ROTATE_KV),
    "stale gathered keys in backward": (attention, "backward", _stale_keys, schedules.GATHER_KV),
    "a missing step of the ring": (attention, "_arriving", _without_the_last_step, schedules.ROTATE_KV),
    "the LSE of another rank": (Pending, "wait", _of_another_rank, schedules.MOVE_Q),
    "a sink in every partial": (merge, "partial_softmax", _sinks_in_every_partial, schedules.ROTATE_KV),
    "lost gradients of one rank's keys": (attention, "_sent_home", _lost_on_the_last_rank, schedules.ROTATE_KV),
}


def planted_errors(at: Site, batch: Batch) -> dict[str, dict[str, float]]:
    """Errors of attention with each fault, and without."""
    errors = {"none": attention_errors(at, batch, schedules.ROTATE_KV)}
    for name, (where, what, fault, schedule) in PLANTED.items():
        with mock.patch.object(where, what, fault):
            errors[name] = attention_errors(at, batch, schedule)
    return errors
