"""The planner: how a batch of prefix trees is spread over ranks, decided on the host before any kernel is launched."""

from augtree_fx.planner.execution import Execution
from augtree_fx.planner.hardware import Hardware
from augtree_fx.planner.known_models import model_shape
from augtree_fx.planner.model_shape import ModelShape
from augtree_fx.planner.plan import Candidate, Lane, Part, Plan, Wave
from augtree_fx.planner.planner import Planner
from augtree_fx.planner.replay_shape import ReplayShape
from augtree_fx.planner.schedule import Schedule

__all__ = [
    "Candidate",
    "Execution",
    "Hardware",
    "Lane",
    "ModelShape",
    "Part",
    "Plan",
    "Planner",
    "ReplayShape",
    "Schedule",
    "Wave",
    "model_shape",
]
