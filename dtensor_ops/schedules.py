"""Who moves between the ranks of a lane; `attention` says what each of them does."""

from __future__ import annotations

ROTATE_KV, MOVE_Q, GATHER_KV = "rotate_kv", "move_q", "gather_kv"
SCHEDULES = (ROTATE_KV, MOVE_Q, GATHER_KV)
