"""What ranks run in tests of faults: a rank that differs, is late, dies, or computes something wrong."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cp_workers import halves, model_and_truth, parallel_model, state_of
from torch import distributed

import augtree_fx
from augtree_fx import CostModel
from augtree_fx.dtensor_ops import attention
from augtree_fx.dtensor_ops.agreement import HostGroup
from augtree_fx.dtensor_ops.lanes import LanePlan
from augtree_fx.layout import TreeLayout


def swapped_halves(layout: TreeLayout, num_ranks: int) -> list[LanePlan]:
    """As `halves`, and on one rank alone with another schedule."""
    found = halves(layout, num_ranks)
    if distributed.get_rank() == 1:
        found[0] = LanePlan(found[0].ranks, found[0].rows, attention.GATHER_KV)
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

    return {
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
            patch = mock.patch.object(attention, "_keys", lambda *_: os._exit(1))
            patch.start()

    if where == "forward":
        deadly()
    (folder / str(rank)).write_text(said(step))
    os._exit(0)  # as a trainer that got an error, which ends what others may wait for
