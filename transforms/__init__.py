"""The FX pass: capture attention modules, rewrite their attention, install the result by a class swap."""

from augtree_fx.transforms.capture import AttentionSite, Refusal, capture_stack
from augtree_fx.transforms.context import ReplayContext
from augtree_fx.transforms.install import install, is_installed, uninstall
from augtree_fx.transforms.stack import find_stack
from augtree_fx.transforms.state import StackState

__all__ = [
    "AttentionSite",
    "Refusal",
    "ReplayContext",
    "StackState",
    "capture_stack",
    "find_stack",
    "install",
    "is_installed",
    "uninstall",
]
