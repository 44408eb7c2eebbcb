"""Install: the generated forward becomes that of a subclass, and the module's ``__class__`` is swapped, as FSDP2 does.

Parameters, state-dict keys, hooks, adapters, ``deepcopy``, pickle and ``isinstance`` hold; the subclass keeps the name,
module and signature of its base. Without a tree the original forward runs.
"""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from augtree_fx.transforms.capture import CONTEXT, AttentionSite
from augtree_fx.transforms.rewrite import rewrite_attention
from augtree_fx.transforms.stack import StackState, run_stack

_BASE = "_augtree_base"
STATE = "_augtree_state"


def is_installed(module: nn.Module) -> bool:
    """Whether a module's class was swapped by `install`."""
    return any(_BASE in cls.__dict__ for cls in type(module).__mro__)


def install(stack: nn.Module, sites: list[AttentionSite], state: StackState) -> None:
    """Swap the classes of a stack and of its captured attention modules; nothing else of them changes."""
    compiled: dict[int, Callable[..., Any]] = {}
    for site in sites:
        if id(site.graph) not in compiled:
            compiled[id(site.graph)] = _generate(site)
        _swap(stack.get_submodule(site.name), _attention_forward, (compiled[id(site.graph)], site.arguments))
    _swap(stack, _stack_forward, ())
    setattr(stack, STATE, state)


def uninstall(stack: nn.Module) -> None:
    """Undo `install`: classes back, the state attribute gone."""
    for module in stack.modules():
        if is_installed(module):
            module.__class__ = _without_swap(type(module))
    if hasattr(stack, STATE):
        delattr(stack, STATE)


def _without_swap(cls: type) -> type:
    """The class below the swapped one; a wrapper class on top (FSDP2 swaps too) cannot be peeled from here."""
    if _BASE not in cls.__dict__:
        raise NotImplementedError(
            f"{cls.__name__} was wrapped by {cls.__mro__[0].__module__} after transform; undo the wrapping first"
        )
    return cls.__dict__[_BASE]


def _generate(site: AttentionSite) -> Callable[..., Any]:
    """Python function of the rewritten graph: ``(self, augtree_context, ...)``; its source shows in tracebacks."""
    graph = fx.Graph()
    output = graph.graph_copy(site.graph, {})
    graph.output(output)
    rewritten = rewrite_attention(graph, site)
    assert rewritten == 1, f"one attention call must match, {rewritten} did"
    code = graph.python_code("self")
    name = f"<augtree {site.class_name} {site.name}>"
    scope = dict(code.globals)
    exec(compile(code.src, name, "exec"), scope)
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
    function = scope["forward"]
    function.source = code.src
    return function


def _swap(module: nn.Module, make_forward: Callable[..., Any], record: tuple[Any, ...]) -> None:
    module.__class__ = swapped_class(type(module), make_forward, record)


def swapped_class(base: type, make_forward: Callable[..., Any], record: tuple[Any, ...]) -> type:
    """Subclass of ``base`` with another forward, indistinguishable by name, module, signature and isinstance."""
    forward = functools.wraps(base.forward)(make_forward(base, *record))  # type: ignore[attr-defined]
    return type(
        base.__name__,
        (base,),
        {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": _reduce,
            "forward": forward,
            _BASE: base,
            "_augtree_record": (make_forward, record),
        },
    )


def _reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickle as base class + how to swap it: the class itself exists in no module."""
    make_forward, record = type(self)._augtree_record  # type: ignore[attr-defined]
    if record:
        function, arguments = record
        record = (
            _Source(
                function.source,
                {k: v for k, v in function.__globals__.items() if k != "__builtins__" and k != "forward"},
            ),
            arguments,
        )
    return _restore_instance, (type(self).__dict__[_BASE], make_forward, record), self.__getstate__()  # type: ignore[attr-defined]


class _Source:
    """A generated function in a form that pickles: its source and the globals that it names."""

    def __init__(self, source: str, scope: dict[str, Any]) -> None:
        self.source, self.scope = source, scope

    def compile(self) -> Callable[..., Any]:
        scope = dict(self.scope)
        exec(compile(self.source, "<augtree unpickled>", "exec"), scope)
        scope["forward"].source = self.source
        return scope["forward"]


def _restore_instance(base: type, make_forward: Callable[..., Any], record: tuple[Any, ...]) -> nn.Module:
    if record:
        record = (record[0].compile(), record[1])
    cls = swapped_class(base, make_forward, record)
    return cls.__new__(cls)  # type: ignore[call-overload]


def _attention_forward(base: type, function: Callable[..., Any], arguments: tuple[str, ...]) -> Callable[..., Any]:
    original = base.forward  # type: ignore[attr-defined]
    parameters = list(inspect.signature(inspect.unwrap(original)).parameters)[1:]
    names = arguments[1:]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        context = kwargs.get(CONTEXT)
        if context is None:
            return original(self, *args, **kwargs)
        given = dict(zip(parameters, args, strict=False)) | kwargs
        return function(self, context, *(given[name] for name in names))

    return forward


def _stack_forward(base: type) -> Callable[..., Any]:
    original = base.forward  # type: ignore[attr-defined]
    parameters = list(inspect.signature(inspect.unwrap(original)).parameters)[1:]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        return run_stack(self, getattr(self, STATE), functools.partial(original, self), given)

    return forward
