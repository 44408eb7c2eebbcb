"""Memory of one rank: what stays, what a pass keeps for its backward, and what one layer needs while it runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from augtree_fx.planner.units import FloatArray
from augtree_fx.planner.work import Costs

# Activations that one layer keeps of a token without checkpointing, in (hidden size + width of queries). Peak memory of
# examples/results/2026-11-29-step-h200.md less weights and gradients: 13.0 (8B) to 14.4 (1.7B).
ACTIVATION_WIDTHS = 14
HEAD_CHUNK_TOKENS = 2048  # float32 logits and their gradient exist for so many tokens at a time; fits the same peaks
FLOAT32_BYTES = 4
GATHERED_LAYERS = 2  # FSDP holds the running layer and the one that it fetches


@dataclass(frozen=True)
class MemoryModel:
    """Bytes of one rank, linear in tokens.

    Attributes:
        limit_bytes: what a plan may fill.
        fixed_bytes: weights, gradients, optimizer, gathered layers, a chunk of logits.
        kept_bytes: of one token of the rank, from forward to backward, all layers.
        layer_bytes: of one token of the rank, in the layer that runs.
        kv_bytes: of one prompt token of the rank whose keys and values outlive its pass, and their gradients.
        gathered_bytes: of one token of the lane on every rank: gathered keys and values, or queries and partials.
    """

    limit_bytes: float
    fixed_bytes: float
    kept_bytes: float
    layer_bytes: float
    kv_bytes: float
    gathered_bytes: float

    @staticmethod
    def of(costs: Costs) -> MemoryModel:
        """Memory of a model on a machine."""
        model, execution = costs.model, costs.execution
        ranks = costs.world_size if execution.shard_weights else 1
        body = model.total_weights - model.vocab_size * model.hidden_size
        gathered = GATHERED_LAYERS * body / model.num_layers + model.vocab_size * model.hidden_size
        weights = model.total_weights * (model.dtype_bytes + execution.state_bytes_per_weight) / ranks
        logits = 2 * HEAD_CHUNK_TOKENS * model.vocab_size * FLOAT32_BYTES
        layer = ACTIVATION_WIDTHS * (model.hidden_size + model.query_values_per_token) * model.dtype_bytes
        kept = model.num_layers * (model.hidden_size * model.dtype_bytes if execution.checkpointing else layer)
        gradient_bytes = FLOAT32_BYTES * execution.backwards
        moved = max(model.kv_values_per_token, model.query_values_per_token + model.output_values_per_token)
        return MemoryModel(
            limit_bytes=costs.hardware.memory_bytes * execution.usable_memory,
            fixed_bytes=weights + (gathered * model.dtype_bytes if ranks > 1 else 0) + logits,
            kept_bytes=0.0 if execution.forward_only else kept,
            layer_bytes=layer,
            kv_bytes=model.num_layers * model.kv_values_per_token * (model.dtype_bytes + gradient_bytes),
            gathered_bytes=moved * (model.dtype_bytes + FLOAT32_BYTES),
        )

    def peak_bytes(
        self, inner: npt.ArrayLike, leaf: npt.ArrayLike, degree: npt.ArrayLike, *, waved: npt.ArrayLike
    ) -> FloatArray:
        """Peak of one rank.

        Args:
            inner: prefilled tokens of the lane that are alive together.
            leaf: branch tokens of the lane that are alive together.
            degree: ranks of the lane.
            waved: whether prompts outlive their pass, since branches come in several.
        """
        inner, leaf, degree = (np.asarray(values, dtype=np.float64) for values in (inner, leaf, degree))
        waved = np.asarray(waved, dtype=bool)
        per_rank = inner / degree * (self.kept_bytes + waved * self.kv_bytes) + leaf / degree * self.kept_bytes
        running = np.where(waved, np.maximum(inner, leaf), inner + leaf) / degree * self.layer_bytes
        gathered = np.where(degree > 1, np.maximum(inner, leaf) * self.gathered_bytes, 0.0)
        return self.fixed_bytes + per_rank + running + gathered

    def peak_of_lane(self, inner: float, leaf: float, degree: int, *, waved: bool) -> float:
        """`peak_bytes` of a single lane, to the bit: packing asks unit by unit, and arrays are far slower at that."""
        per_rank = inner / degree * (self.kept_bytes + waved * self.kv_bytes) + leaf / degree * self.kept_bytes
        running = (max(inner, leaf) if waved else inner + leaf) / degree * self.layer_bytes
        gathered = max(inner, leaf) * self.gathered_bytes if degree > 1 else 0.0
        return self.fixed_bytes + per_rank + running + gathered

    def slopes(self, degree: int) -> tuple[float, float]:
        """Bytes that one more token adds to a pass over prompts and branches: any one, and one of the longer side."""
        return (self.kept_bytes + self.layer_bytes) / degree, self.gathered_bytes if degree > 1 else 0.0

    def surely_fits(self, tokens: float) -> bool:
        """Whether so many tokens fit on a rank whatever the lane and the schedule are: quickly asked, never wrong."""
        most = self.kept_bytes + self.kv_bytes + self.layer_bytes + self.gathered_bytes
        return self.fixed_bytes + tokens * most <= self.limit_bytes

    def wave_tokens(self, inner: float, degree: int) -> int:
        """Most branch tokens of a lane that fit at once beside its prompts, 0 if not even those fit."""
        free = self.limit_bytes - self.peak_of_lane(inner, 0.0, degree, waved=True)
        if free <= 0:
            return 0
        # Every branch token costs at most this; the running layer's and the gathered part of prompts is counted twice.
        share = self.gathered_bytes if degree > 1 else 0.0
        return int(free / ((self.kept_bytes + self.layer_bytes) / degree + share))
