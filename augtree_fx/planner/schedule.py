"""Who moves while responses are replayed against a prompt that is sharded over a lane."""

from __future__ import annotations

from enum import StrEnum


class Schedule(StrEnum):
    """Direction of communication inside a lane.

    Attributes:
        ROTATE_KV: shards of the prompt's KV travel around a ring; queries stay.
        MOVE_Q: queries travel to the owners of prompt KV; partials come back and are merged by partial softmax.
        GATHER_KV: every rank of the lane gathers the prompt's KV; nothing is merged.
    """

    ROTATE_KV = "rotate_kv"
    MOVE_Q = "move_q"
    GATHER_KV = "gather_kv"
