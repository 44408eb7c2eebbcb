"""Who takes part in ``bench cp``, in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import distributed
from torch.nn.attention import SDPBackend

from augtree_fx.dtensor_ops.schedules import SCHEDULES
from augtree_fx.examples.bench.cp.contender import Contender
from augtree_fx.examples.bench.cp.dynamic import DynamicRows
from augtree_fx.examples.bench.cp.ours import Ours
from augtree_fx.examples.bench.cp.ring_rows import RingRows
from augtree_fx.examples.bench.cp.ring_tree import RingTree
from augtree_fx.examples.bench.cp.torch_cp import TorchContextParallel
from augtree_fx.examples.bench.cp.ulysses import Ulysses


@dataclass(frozen=True)
class Entry:
    """A contender of the race.

    Attributes:
        key: what ``--only`` and ``--skip`` call it.
        name: as in the table.
        build: makes it for an axis, on all of its ranks; raises what is missing.
        reuse: whether it computes a prompt once for all of its responses, and so takes the whole batch.
    """

    key: str
    name: str
    build: Callable[[distributed.ProcessGroup], Contender]
    reuse: bool = False


OURS = "augtree"
# Ratios are over the first one that passed the gate: ours, else what prefix sharing and ring attention give together.
ENTRIES = (
    Entry(OURS, "augtree", Ours, reuse=True),
    *(
        Entry(f"{OURS}-{schedule}", f"augtree, {schedule}", partial(Ours, schedule=schedule), reuse=True)
        for schedule in SCHEDULES
    ),
    Entry("ring-reuse", "ring, prompt reused", RingTree, reuse=True),
    Entry("ring", "ring, no reuse", RingRows),
    Entry("ulysses", "Ulysses, no reuse", Ulysses),
    Entry("dynamic", "dynamic CP, no reuse", DynamicRows),
    Entry("torch-flash", "torch CP, flash", partial(TorchContextParallel, backend=SDPBackend.FLASH_ATTENTION)),
    Entry("torch-cudnn", "torch CP, cuDNN", partial(TorchContextParallel, backend=SDPBackend.CUDNN_ATTENTION)),
    Entry(
        "torch-flash-heads", "torch CP, flash, KV heads repeated",
        partial(TorchContextParallel, backend=SDPBackend.FLASH_ATTENTION, repeat_kv=True),
    ),
)  # fmt: skip
KEYS = tuple(entry.key for entry in ENTRIES)
