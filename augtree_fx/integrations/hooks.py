"""Functions of a framework that are replaced by wrappers of themselves, for frameworks that have no other way in."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

import augtree_fx
from augtree_fx.integrations.report import state_of

logger = logging.getLogger("augtree_fx")

_ORIGINAL = "_augtree_original"


class Hook(NamedTuple):
    """One function to replace.

    Attributes:
        module: full name of the module; it is not imported for this, since not every worker of a framework may.
        name: of the function in it, or class and method with a dot.
        wrap: makes a new function that takes its place, from the original one.
    """

    module: str
    name: str
    wrap: Callable[[Any], Any]

    def place(self) -> tuple[Any, str]:
        """What has the function as an attribute, and the attribute's name."""
        found: Any = sys.modules[self.module]
        *outer, name = self.name.split(".")
        for attribute in outer:
            found = getattr(found, attribute)
        return found, name


def install_hooks(hooks: Sequence[Hook]) -> None:
    """Replace functions of modules that are imported now, and of the others as soon as they are.

    Calling it again changes nothing.
    """
    _replace([hook for hook in hooks if hook.module in sys.modules])
    if not any(isinstance(finder, _OnImport) and finder.hooks == hooks for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnImport(hooks))


def remove_hooks(hooks: Sequence[Hook]) -> None:
    """Put the originals back."""
    sys.meta_path[:] = [x for x in sys.meta_path if not (isinstance(x, _OnImport) and x.hooks == hooks)]
    for hook in hooks:
        if hook.module in sys.modules:
            place, name = hook.place()
            found = getattr(place, name)
            setattr(place, name, getattr(found, _ORIGINAL, found))


def _replace(hooks: Sequence[Hook]) -> None:
    for hook in hooks:
        place, name = hook.place()
        original = getattr(place, name)
        if not hasattr(original, _ORIGINAL):
            wrapper = hook.wrap(original)
            setattr(wrapper, _ORIGINAL, original)
            setattr(place, name, wrapper)


class _OnImport(MetaPathFinder):
    """Replaces functions of a module when it has been imported; other finders find it."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks = hooks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        mine = [hook for hook in self.hooks if hook.module == fullname]
        others = [finder for finder in sys.meta_path if not isinstance(finder, _OnImport)] if mine else []
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _ReplacingLoader(spec.loader, mine)
        return spec


class _ReplacingLoader(Loader):
    """A loader that replaces functions when it has loaded a module. Loaders may be shared, so none is changed."""

    def __init__(self, loader: Loader, hooks: Sequence[Hook]) -> None:
        self._loader, self._hooks = loader, hooks

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _replace(self._hooks)

    def __getattr__(self, name: str) -> Any:  # sources and files of the module, for tracebacks and resources
        return getattr(self._loader, name)


def transform_or_say_why(model: nn.Module, advice: str) -> None:
    """Transform a model inside of a framework, which is to go on, unshared, where that cannot be.

    Args:
        model: any model.
        advice: what to do in this framework about groups that are torn.
    """
    try:
        augtree_fx.transform(model, strict=False)
    except (TypeError, ValueError, NotImplementedError) as error:  # no transformers model, compiled, encoder-decoder
        logger.warning("augtree-fx: left unchanged: %s", error)
        return
    state = state_of(model)
    if state is not None:
        state.torn.advice = advice
