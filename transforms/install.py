"""Install: the generated forward becomes that of a subclass, and the module's ``__class__`` is swapped, as FSDP2 does.

Parameters, state-dict keys, hooks, adapters, ``deepcopy``, pickle and ``isinstance`` hold; the subclass keeps the name,
module and signature of its base. Without a tree the original forward runs.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import types
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from augtree_fx.transforms.capture import AttentionSite
from augtree_fx.transforms.carrier import ContextMask
from augtree_fx.transforms.classes import bound_forwards, hides_forward
from augtree_fx.transforms.context import SiteContext
from augtree_fx.transforms.expansion import Expansion
from augtree_fx.transforms.path_rows import run_rows
from augtree_fx.transforms.rewrite import rewrite_attention
from augtree_fx.transforms.row_masks import RowMasks
from augtree_fx.transforms.skeleton import CONTEXT
from augtree_fx.transforms.stack import run_stack
from augtree_fx.transforms.state import StackState

_BASE = "_augtree_base"
STATE = "_augtree_state"
_REWRITTEN = "_augtree_forward"
_SITE = "_augtree_site"
_MASKS = "_augtree_masks"


def is_installed(module: nn.Module) -> bool:
    """Whether a module's class was swapped by `install`."""
    return any(_BASE in cls.__dict__ for cls in type(module).__mro__)


def install(stack: nn.Module, sites: list[AttentionSite], state: StackState) -> None:
    """Swap the classes of a stack and of its captured modules; nothing else of them changes."""
    generated: dict[int, RewrittenForward] = {}
    for site in sites:
        if id(site.graph) not in generated:
            generated[id(site.graph)] = RewrittenForward.of(site, with_latents=state.lanes is not None)
    for site in sites:  # from here on nothing can fail
        module = stack.get_submodule(site.name)
        _set_class(module, swapped_class(type(module), attention_forward))  # type: ignore[arg-type]
        setattr(module, _REWRITTEN, generated[id(site.graph)])
        setattr(module, _SITE, site.name)
    for mixer in state.mixers:
        module = stack.get_submodule(mixer.name)
        _set_class(module, swapped_class(type(module), mixer_forward))  # type: ignore[arg-type]
        if mixer.masks:
            setattr(module, _MASKS, RowMasks(mixer.masks, stack.config))
    _set_class(stack, swapped_class(type(stack), stack_forward))  # type: ignore[arg-type]
    setattr(stack, STATE, state)


def uninstall(stack: nn.Module) -> None:
    """Undo `install`: classes back, attributes gone.

    Raises:
        NotImplementedError: a wrapper swapped a class or hid a forward since; nothing was undone then.
    """
    installed = [module for module in stack.modules() if is_installed(module)]
    for module in installed:
        if _BASE not in type(module).__dict__:
            raise NotImplementedError(
                f"{type(module).__name__} was wrapped after transform (by {type(module).__module__}); undo that first"
            )
        if hides_forward(module):
            raise NotImplementedError(
                f"{type(module).__name__} was given a forward of its own after transform; undo that first"
            )
    for module in installed:
        _set_class(module, type(module).__dict__[_BASE])
        for attribute in (STATE, _REWRITTEN, _SITE, _MASKS):
            vars(module).pop(attribute, None)


def _set_class(module: nn.Module, cls: type) -> None:
    """Swap a module's class; a device hook of accelerate then calls the forward of the new one."""
    held = bound_forwards(module)
    module.__class__ = cls
    for name in held:
        vars(module)[name] = types.MethodType(cls.forward, module)  # type: ignore[attr-defined]


class RewrittenForward:
    """The function of a rewritten graph: ``(self, augtree_context, ...)``. Pickles as its source, without latents.

    A model that has those lies on a mesh, and does not pickle.

    Attributes:
        source: generated Python, which also shows in tracebacks.
        arguments: names of the attention module's arguments that it takes.
        expansion: of latents that ranks send one another, where there are such.
    """

    def __init__(
        self,
        name: str,
        source: str,
        scope: dict[str, Any],
        arguments: tuple[str, ...],
        expansion: Expansion | None = None,
    ) -> None:
        self.name, self.source, self.arguments, self.expansion = name, source, arguments, expansion
        self._scope = scope
        compiled = dict(scope)
        exec(compile(source, name, "exec"), compiled)
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        self.function = compiled["forward"]

    @staticmethod
    def of(site: AttentionSite, *, with_latents: bool = False) -> RewrittenForward:
        """Rewrite a captured site's graph and generate its function, and that of what its latents become."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(site.graph, {}))
        rewritten = rewrite_attention(graph, site, with_latents=with_latents)
        assert rewritten > 0, "an attention call must match, none did"
        code, name, expansion = graph.python_code("self"), f"<augtree {site.class_name} {site.name}>", None
        if with_latents and site.cut is not None:
            behind = site.cut.graph.python_code("self")
            expand = RewrittenForward(f"{name[:-1]}, latents>", behind.src, dict(behind.globals), ())
            expansion = Expansion(expand.function, site.cut.dims, site.cut.modules)
        return RewrittenForward(name, code.src, dict(code.globals), site.arguments[1:], expansion)

    def __deepcopy__(self, memo: dict[int, Any]) -> RewrittenForward:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        modules = {name: value.__name__ for name, value in self._scope.items() if isinstance(value, types.ModuleType)}
        scope = {name: value for name, value in self._scope.items() if name not in modules}
        return _unpickle, (self.name, self.source, scope, modules, self.arguments)


def _unpickle(
    name: str, source: str, scope: dict[str, Any], modules: dict[str, str], arguments: tuple[str, ...]
) -> RewrittenForward:
    imported = {alias: importlib.import_module(module) for alias, module in modules.items()}
    return RewrittenForward(name, source, {**scope, **imported}, arguments)


@functools.cache
def swapped_class(base: type, make_forward: Callable[[type], Callable[..., Any]]) -> type:
    """Subclass of ``base`` with another forward; name, module, signature and isinstance are those of ``base``.

    One class for a base, so that whoever looks classes up by name (FSDP wrapping) finds all of its instances.
    """
    return type(
        base.__name__,
        (base,),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": _reduce,
            "forward": functools.wraps(base.forward)(make_forward(base)),  # type: ignore[attr-defined]
            _BASE: base,
            "_augtree_make_forward": make_forward,
        },
    )


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    """Pickle as base class + how to swap it: the class itself exists in no module."""
    cls = type(self)
    return _new_instance, (cls.__dict__[_BASE], cls.__dict__["_augtree_make_forward"]), self.__getstate__()


def _new_instance(base: type, make_forward: Callable[[type], Callable[..., Any]]) -> Any:
    cls = swapped_class(base, make_forward)
    return cls.__new__(cls)  # type: ignore[call-overload]


def _parameters(base: type) -> list[str]:
    return list(inspect.signature(inspect.unwrap(base.forward)).parameters)[1:]  # type: ignore[attr-defined]


def attention_forward(base: type) -> Callable[..., Any]:
    """Forward of a swapped attention class: the rewritten graph with a tree, the original without."""
    original, parameters = base.forward, _parameters(base)  # type: ignore[attr-defined]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        context = _context_of(given)
        if context is None:
            return original(self, *args, **kwargs)
        rewritten: RewrittenForward = getattr(self, _REWRITTEN)  # type: ignore[assignment]
        site = SiteContext(context, getattr(self, _SITE), self, rewritten.expansion)  # type: ignore[arg-type]
        return rewritten.function(self, site, *(given[name] for name in rewritten.arguments))

    return forward


def _context_of(given: dict[str, Any]) -> Any:
    """The tree that a module is told of, by a keyword or inside its mask; ``None`` without one."""
    context = given.get(CONTEXT)
    if context is not None:
        return context
    nested = (x for value in given.values() for x in (value.values() if isinstance(value, dict) else (value,)))
    return next((mask.context for mask in nested if isinstance(mask, ContextMask)), None)


def mixer_forward(base: type) -> Callable[..., Any]:
    """Forward of a swapped class that runs row by row: its own, on the rows of a tree."""
    original, parameters = base.forward, _parameters(base)  # type: ignore[attr-defined]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        context = _context_of(given)
        if context is None:
            return original(self, *args, **kwargs)
        given.pop(CONTEXT, None)
        masks: RowMasks | None = getattr(self, _MASKS, None)  # type: ignore[assignment]
        return run_rows(self, original, context.rows, given, None if masks is None else masks.of_rows)

    return forward


def stack_forward(base: type) -> Callable[..., Any]:
    """Forward of a swapped decoder stack."""
    original, parameters = base.forward, _parameters(base)  # type: ignore[attr-defined]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        return run_stack(self, getattr(self, STATE), original, given)  # type: ignore[arg-type]

    return forward
