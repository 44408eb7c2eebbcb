"""Settings and memory of one transformed stack."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from augtree_fx.costs import CostModel
from augtree_fx.dtensor_ops.lanes import Lanes
from augtree_fx.memory import Memory
from augtree_fx.planner import Planner
from augtree_fx.recorder import Recorder
from augtree_fx.transforms.capture import AttentionSite
from augtree_fx.transforms.counts import Counts
from augtree_fx.transforms.positions import PositionRule
from augtree_fx.transforms.recurrent import MixerSite
from augtree_fx.transforms.torn import TornGroups

if TYPE_CHECKING:  # they take a state
    from augtree_fx.planned import PlannedLanes
    from augtree_fx.transforms.footprint import Footprint
    from augtree_fx.transforms.wave_budget import WaveBudget


@dataclass
class StackState:
    """Settings and memory of one transformed stack.

    Attributes:
        sites: captured attention modules.
        mixers: modules with a recurrent or convolution state, and attention in its own code, which run row by row.
        kernel: requested kernel.
        strict: raise on input that cannot be shared exactly, instead of running the original forward.
        costs: what a node must save; ``None`` estimates it from the model and device.
        fallbacks: how often the original forward ran, by reason.
        num_shared: how many batches were shared.
        axes: whether masks look at ``position_ids`` of so many axes, or why the stack cannot take them.
        positions: which positions tokens get by default, and how the stack takes others.
        in_waves: whether a batch is being computed in parts (`augtree_fx.prefill`).
        max_wave_tokens: packed tokens of branches that are alive at a time; ``None`` for all.
        lanes: ranks that share batches, under context parallelism.
        trained: tokens of forwards with gradients.
        scored: tokens of forwards without, such as old and reference log-probs.
        prompt_columns: of the rows that are computed now, where a trainer says it; for what is counted.
        torn: looks for groups in different micro-batches.
        memory: from which to choose that.
        planned: chooses it instead, on one rank.
        budget: the last choice.
        footprints: bytes a token, by the way in which the stack is called.
        recorder: takes the times of what runs, inside of `augtree_fx.measure`; else ``None``.
        measured: the last one that did.
        predicts: what it is compared with, where lanes have no planner.
    """

    sites: tuple[AttentionSite, ...]
    kernel: str = "auto"
    strict: bool = True
    costs: CostModel | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)
    num_shared: int = 0
    axes: dict[int, bool | str] = field(default_factory=dict)
    positions: PositionRule = PositionRule()
    in_waves: bool = False
    max_wave_tokens: int | None = None
    mixers: tuple[MixerSite, ...] = ()
    lanes: Lanes | None = None
    trained: Counts = field(default_factory=Counts)
    scored: Counts = field(default_factory=Counts)
    prompt_columns: int | None = None
    torn: TornGroups = field(default_factory=TornGroups)

    @property
    def counts(self) -> Counts:
        """What the forward that runs now is counted in."""
        return self.trained if torch.is_grad_enabled() else self.scored

    memory: Memory | None = None
    planned: PlannedLanes | None = None
    budget: WaveBudget | None = None
    footprints: dict[Hashable, Footprint] = field(default_factory=dict)
    recorder: Recorder | None = None
    measured: Recorder | None = None
    predicts: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Graphs hold functions that need not pickle; their generated source travels with the classes."""
        sites = tuple(replace(site, graph=torch.fx.Graph()) for site in self.sites)
        copied = {
            "sites": sites, "fallbacks": dict(self.fallbacks), "axes": dict(self.axes), "in_waves": False,
            "footprints": {}, "trained": replace(self.trained), "scored": replace(self.scored),
            "torn": self.torn.fresh(), "recorder": None, "measured": None,
        }  # fmt: skip
        return {**self.__dict__, **copied}
