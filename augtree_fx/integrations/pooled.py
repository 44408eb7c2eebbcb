"""Data-parallel ranks that compute rows together: their mesh, and micro-batches in which groups meet across ranks.

rank 0   A B | A B    a generation batch in two micro-steps, as a trainer deals and shuffles it
rank 1   B A | B A    (a group may also lie on one rank)

rank 0   A A | B B    after `Pool.regroup`: the ranks' rows of one micro-step have whole groups,
rank 1   A A | B B    and prompts are padded to one width, so that they stand at one position
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, arange, cat, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import pad

from augtree_fx.dtensor_ops.agreement import HostGroup
from augtree_fx.integrations.grouping import group_order
from augtree_fx.integrations.report import state_of
from augtree_fx.transforms import find_stack

POOLED = "pooled"
Rows = dict[str, Any]  # by name: tensors [rows, ...], lists, tensors without dimensions, None
PromptsOf = Callable[[Rows], list[bytes]]
Compute = Callable[[Rows], Sequence[Tensor | None]]


def pool_mesh(accelerator: Any, degree: int | None) -> DeviceMesh | None:
    """The pool of this process: ``degree`` processes that follow one another, which hold the rows of a group.

    Args:
        accelerator: of accelerate; its processes are data-parallel ranks.
        degree: ranks of a pool; ``None`` for all processes.

    Returns:
        The pool's axis; ``None`` where it is one process, whose rows are together anyway.

    Raises:
        ValueError: ``degree`` does not divide the number of processes.
        NotImplementedError: processes are not ranks of DDP or FSDP2 alone.
    """
    world = accelerator.num_processes
    degree = world if degree is None else degree
    if degree < 1 or world % degree:
        divisors = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise ValueError(f"degree must divide the number of processes {world}, got {degree}; use one of {divisors}")
    if degree == 1:
        return None
    _check_data_parallel(accelerator)
    # Two axes, so that the pool has a process group of its own also where it is the world: DDP's and FSDP2's transfers
    # and ours are then never in one queue.
    mesh = init_device_mesh(accelerator.device.type, (world // degree, degree), mesh_dim_names=("replicas", "pool"))
    return mesh["pool"]


def _check_data_parallel(accelerator: Any) -> None:
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise NotImplementedError(f"rows='pooled' was tried with DDP and FSDP2, got {kind}; use one of these")
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if kind == "FSDP" and plugin is not None and plugin.fsdp_version != 2:
        raise NotImplementedError(f"rows='pooled' needs FSDP2, got fsdp_version={plugin.fsdp_version}; set it to 2")
    parallelism = getattr(accelerator, "parallelism_config", None)
    axes = [axis for axis in ("tp", "cp", "sp") if getattr(parallelism, f"{axis}_enabled", False)]
    if axes:
        raise NotImplementedError(
            f"rows='pooled' takes ranks that have rows of their own, and accelerate's {', '.join(axes)} ranks share "
            "them; leave that out of parallelism_config"
        )


@contextlib.contextmanager
def ranks_apart(models: Sequence[nn.Module]) -> Iterator[None]:
    """Forwards of models that are transformed on a mesh are each rank's own."""
    states = [state for state in map(state_of, models) if state is not None]
    lanes = [state.lanes for state in states]
    for state in states:
        state.lanes = None
    try:
        yield
    finally:
        for state, kept in zip(states, lanes, strict=True):
            state.lanes = kept


@dataclass(frozen=True)
class Pool:
    """Ranks of a mesh axis that pass their own rows to one model, in step.

    Attributes:
        host: the ranks.
        models: transformed on their mesh.
        pad_token_id: in place of tokens that a row does not have.
        movable: whether a row computes the same wherever it is padded to; otherwise rows stay where they are.
    """

    host: HostGroup
    models: tuple[nn.Module, ...]
    pad_token_id: int
    movable: bool

    @staticmethod
    def of(models: Sequence[nn.Module], pad_token_id: int) -> Pool | None:
        """The pool of a policy, the first of its trainer's models; ``None`` where it has none."""
        state = state_of(models[0]) if models else None
        if state is None or state.lanes is None or state.lanes.rows != POOLED:
            return None
        return Pool(state.lanes.host, tuple(models), pad_token_id, _is_rotary(models[0]))

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Every rank on its own: ranks generate different numbers of tokens."""
        with ranks_apart(self.models):
            yield

    def padded(
        self, input_ids: Tensor, attention_mask: Tensor, prompt: int, batch_size: int | None
    ) -> tuple[Tensor, Tensor]:
        """Rows whose prompts are as wide as the widest of all ranks, which compute them in as many forwards.

        Args:
            input_ids, attention_mask: ``[rows, prompt + completion]``, prompts padded on the left.
            prompt: columns of the prompt.
            batch_size: rows of a forward; ``None`` for all of them.

        Raises:
            RuntimeError: ranks do not make the same number of forwards, or of several with other numbers of rows.
        """
        num_forwards = math.ceil(len(input_ids) / batch_size) if batch_size else 1
        said = {"forwards of its rows": num_forwards, "rows": len(input_ids) if num_forwards > 1 else "of one forward"}
        found = self.host.exchange((said, prompt))
        self.host.check("what ranks compute together", [each for each, _ in found])
        gap = max(width for _, width in found) - prompt
        if not gap or not self.movable:
            return input_ids, attention_mask
        return pad(input_ids, (gap, 0), value=self.pad_token_id), pad(attention_mask, (gap, 0))

    def meeting(self, chunks: list[Rows], prompts_of: PromptsOf, compute: Compute) -> tuple[Tensor | None, ...]:
        """What is computed for this rank's rows, each on the rank where its group meets; without gradients.

        Args:
            chunks, prompts_of: as of `regroup`.
            compute: of as many rows as this rank has, in micro-batches: tensors ``[rows, ...]`` or ``None``.

        Raises:
            RuntimeError, NotImplementedError: as of `regroup`.
        """
        sizes = [len(chunk["prompt_ids"]) for chunk in chunks]
        begin, end = sum(sizes) * self.host.rank, sum(sizes) * (self.host.rank + 1)
        numbers = arange(begin, end).split(sizes)
        dealt = self.regroup([chunk | {"row": row} for chunk, row in zip(chunks, numbers, strict=True)], prompts_of)
        rows = {name: joined([chunk[name] for chunk in dealt]) for name in dealt[0]}
        found = self.host.exchange((rows["row"].cpu(), [_to(each, "cpu") for each in compute(rows)]))
        back = cat([row for row, _ in found]).argsort()[begin:end]
        device = chunks[0]["prompt_ids"].device
        columns = zip(*(results for _, results in found), strict=True)
        return tuple(None if parts[0] is None else cat(parts)[back].to(device) for parts in columns)

    def regroup(self, chunks: list[Rows], prompts_of: PromptsOf) -> list[Rows]:
        """This rank's micro-batches, such that rows of equal prompts are in one micro-step of all ranks.

        Args:
            chunks: this rank's micro-batches, all of as many rows; images are lists, an entry a row.
            prompts_of: reads the prompts off rows.

        Raises:
            RuntimeError: ranks differ in the number of micro-batches, of their rows, or in what rows are made of.
            NotImplementedError: rows of the ranks have different shapes in something that is not known to be padded.
        """
        mine = {name: joined([chunk[name] for chunk in chunks]) for name in chunks[0]}
        size = len(chunks[0]["prompt_ids"])
        shape = {"micro-batches": len(chunks), "rows": [len(chunk["prompt_ids"]) for chunk in chunks]}
        said = shape | {"columns": sorted(name for name, value in mine.items() if value is not None)}
        device = mine["prompt_ids"].device
        found = self.host.exchange((said, {name: _to(value, "cpu") for name, value in mine.items()}))
        self.host.check("a generation batch", [each for each, _ in found])
        parts = [rows for _, rows in found]
        rows = {name: self._whole(name, parts) for name in parts[0]}
        num_ranks, num_chunks, rank = len(parts), len(chunks), self.host.rank
        # By micro-step, then by rank: groups are trained in the order in which the ranks' shuffles have them.
        dealt = [
            (peer * num_chunks + step) * size + row
            for step in range(num_chunks)
            for peer in range(num_ranks)
            for row in range(size)
        ]
        prompts = prompts_of(rows)
        order = [dealt[i] for i in group_order([prompts[row] for row in dealt], num_chunks)]
        begins = [(step * num_ranks + rank) * size for step in range(num_chunks)]
        return [
            {name: _to(taken(value, order[begin : begin + size]), device) for name, value in rows.items()}
            for begin in begins
        ]

    def _whole(self, name: str, parts: list[Rows]) -> Any:
        """A column of all ranks' rows, padded to one width: prompts on the left, completions on the right."""
        values = [rows[name] for rows in parts]
        first = values[0]
        if not isinstance(first, Tensor) or not first.ndim:
            return [row for value in values for row in value] if isinstance(first, list) else first
        if len({value.shape[1:] for value in values}) > 1:
            left = name in ("prompt_ids", "prompt_mask")
            like = "prompt_ids" if left else "completion_ids"
            if any(value.shape[1:] != rows[like].shape[1:] for value, rows in zip(values, parts, strict=True)):
                raise NotImplementedError(
                    f"rows of several ranks must have one shape, {name} has {[tuple(v.shape[1:]) for v in values]}; "
                    "pad it to one width, or leave out rows='pooled'"
                )
            width = max(value.shape[1] for value in values)
            fill = self.pad_token_id if name.endswith("_ids") else 0
            gaps = [(width - v.shape[1], 0) if left else (0, width - v.shape[1]) for v in values]
            values = [pad(value, gap, value=fill) for value, gap in zip(values, gaps, strict=True)]
        return cat(values)


def split_rows(input_ids: Tensor, attention_mask: Tensor, completion: int, size: int) -> list[Rows]:
    """Micro-batches of ``size`` rows ``[rows, prompt + completion]``, prompts and completions apart."""
    parts = (("prompt", slice(-completion)), ("completion", slice(-completion, None)))
    columns = {
        f"{part}_{name}": value[:, where].split(size)
        for name, value in (("ids", input_ids), ("mask", attention_mask))
        for part, where in parts
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _is_rotary(model: nn.Module) -> bool:
    """Whether positions only turn queries and keys, so that more padding in front of a row changes nothing."""
    return any("RotaryEmbedding" in type(module).__name__ for module in find_stack(model).modules())


def _to(value: Any, device: Any) -> Any:
    if isinstance(value, list):
        return [_to(each, device) for each in value]
    return value.to(device) if isinstance(value, Tensor) else value


def joined(values: list[Any]) -> Any:
    """A column of several batches' rows as one; what has no rows is that of the first batch."""
    first = values[0]
    if isinstance(first, Tensor) and first.ndim:
        return cat(values)
    return [row for value in values for row in value] if isinstance(first, list) else first


def taken(value: Any, order: list[int]) -> Any:
    """Rows of a column in an order; what has no rows as it is."""
    if isinstance(value, Tensor) and value.ndim:
        return value[order]
    return [value[row] for row in order] if isinstance(value, list) else value
