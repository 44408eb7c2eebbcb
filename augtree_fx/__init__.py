"""augtree-fx: what rows of a batch share is computed once, differentiably, in unmodified models and trainers."""

from __future__ import annotations

from pathlib import Path


def _extend_path_in_checkout() -> None:
    """Make `augtree_fx.transforms` importable from a bare checkout, where it lies beside this package, not inside it.

    Installs keep it inside the package, so nothing happens there. A folder counts as our checkout only if its
    pyproject.toml says so: somebody's own `transforms`, beside a copied `augtree_fx`, is never picked up.
    """
    package = Path(__file__).resolve().parent
    if (package / "transforms" / "__init__.py").is_file():
        return
    root = package.parent
    project = root / "pyproject.toml"
    if project.is_file() and '\nname = "augtree-fx"\n' in project.read_text(encoding="utf-8"):
        __path__.append(str(root))


_extend_path_in_checkout()

from augtree_fx import ops  # noqa: E402  (declares torch.ops.augtree)
from augtree_fx.costs import CostModel  # noqa: E402
from augtree_fx.explain import Explanation, explain  # noqa: E402
from augtree_fx.face import RewriteError, pack, restore, transform  # noqa: E402
from augtree_fx.layout import TreeLayout  # noqa: E402
from augtree_fx.planner import Hardware, ModelShape, Plan, Planner, ReplayShape  # noqa: E402
from augtree_fx.replay import Tree, prefill  # noqa: E402
from augtree_fx.timings import Timings, measure  # noqa: E402
from augtree_fx.wave import Wave  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "CostModel",
    "Explanation",
    "Hardware",
    "ModelShape",
    "Plan",
    "Planner",
    "ReplayShape",
    "RewriteError",
    "Timings",
    "Tree",
    "TreeLayout",
    "Wave",
    "explain",
    "measure",
    "ops",
    "pack",
    "prefill",
    "restore",
    "transform",
]
