"""An FX tracer that carries example values, so that shapes can be unpacked, counted and tested while tracing.

Submodules are leaves, module-level functions of the modelling file are leaves (an `autograd.Function` inside one
keeps its backward), and the call of the attention interface is one leaf.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import types
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.fx.proxy import Attribute, Proxy
from torch.utils._pytree import tree_map_only

_MOST_PARAMETERS = 1 << 24  # 64 MiB in float32, of a module that is run with values during capture


class CaptureError(Exception):
    """This attention cannot be captured; the message is the reason a user reads."""


class UnusedWeights:
    """Stands for the attention weights, which no fast kernel computes; touching it is a `CaptureError`."""

    def __getattr__(self, name: str) -> Any:
        raise CaptureError(f"the attention weights are used (.{name})")


def attention_leaf(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
    """Placeholder in the captured graph for the attention-interface call; `rewrite` replaces it."""
    raise AssertionError("the captured graph must be rewritten before it runs")


class ValueProxy(Proxy):
    """A proxy whose node has an example value."""

    def __getattr__(self, name: str) -> Any:
        return ValueAttribute(self, name)

    def __len__(self) -> int:
        return len(self.node.meta["example"])

    def __setitem__(self, key: Any, value: Any) -> None:
        """Of a mapping that layers share; the example changes, too, so that later layers find the value."""
        if not isinstance(self.node.meta["example"], MutableMapping):
            raise CaptureError("it assigns to a part of a tensor")
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __index__(self) -> int:
        raise CaptureError("a shape is used as a number while tracing")


class ValueAttribute(Attribute):
    """An attribute of a proxy, counted by its example."""

    def __len__(self) -> int:
        return len(self.node.meta["example"])


class AttentionTracer(fx.Tracer):
    """Trace one attention module with example values.

    Args:
        examples: example value of each argument of the traced ``forward``, by name.
    """

    def __init__(self, examples: dict[str, Any]) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]
        self.examples = examples
        self.leaf_kwargs: list[dict[str, Any]] = []
        self.replaced_rotary: set[Callable[..., Any]] = set()
        self.from_values: set[fx.Node] = set()  # nodes whose examples go back to made-up values, not to shapes alone
        self._evaluating = False

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> Proxy:
        return ValueProxy(node, self)

    def iter(self, obj: Any) -> Iterator[Any]:
        return (obj[index] for index in range(len(obj.node.meta["example"])))

    def to_bool(self, obj: Proxy) -> bool:
        if obj.node in self.from_values:
            raise CaptureError("its forward branches on what its inputs hold")
        return bool(obj.node.meta["example"])

    def create_arg(self, a: Any) -> Any:
        return None if isinstance(a, UnusedWeights) else super().create_arg(a)

    def call_module(self, m: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs) if self._evaluating else super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self._evaluating else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Proxy:
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        try:
            proxy.node.meta["example"] = self._example(kind, target, args, kwargs)
        except (NotImplementedError, RuntimeError):  # the meta device has no values
            if kind != "call_module":
                raise
            proxy.node.meta["example"] = self._example_from_zeros(target, args, kwargs)
            self.from_values.add(proxy.node)
        if any(node in self.from_values for node in proxy.node.all_input_nodes):
            self.from_values.add(proxy.node)
        return proxy

    def _example_from_zeros(self, target: str, args: Any, kwargs: Any) -> Any:
        """Example of a module that reads values (a router which counts tokens), from zeros in its place."""
        module = self.root.get_submodule(target)
        if sum(x.numel() for x in module.parameters()) > _MOST_PARAMETERS:
            raise CaptureError(f"{target} reads values of its inputs, and is too large to be run for an example")
        args, kwargs = tree_map_only(torch.Tensor, _zeros, map_aggregate((args, kwargs), _example_of))
        self._evaluating = True
        try:
            filled = copy.deepcopy(module).to_empty(device="cpu")
            for tensor in (*filled.parameters(), *filled.buffers()):
                tensor.data.zero_()
            return tree_map_only(torch.Tensor, lambda x: x.to("meta"), filled.forward(*args, **kwargs))
        finally:
            self._evaluating = False

    def _example(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if kind == "placeholder":
            return self.examples[target]
        if kind == "output":
            return None
        args, kwargs = (map_aggregate(x, _example_of) for x in (args, kwargs))
        self._evaluating = True
        try:
            if kind == "get_attr":
                return functools.reduce(getattr, target.split("."), self.root)
            if target is attention_leaf:
                query, _, value = args
                return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
            if target in self.replaced_rotary:
                return torch.empty_like(args[0]), torch.empty_like(args[1])
            if kind == "call_module":
                module = self.root.get_submodule(target)
                return torch.empty_like(args[0]) if is_norm(module) else module.forward(*args, **kwargs)
            return getattr(args[0], target)(*args[1:], **kwargs) if kind == "call_method" else target(*args, **kwargs)
        finally:
            self._evaluating = False

    def attention_interface(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        """What the traced forward calls instead of an attention function: one leaf node."""
        if attention_mask is not None:
            raise CaptureError(f"it makes a mask of its own inside its attention module ({attention_mask})")
        kwargs.pop("position_ids", None)  # flash attention finds packed sequences by them, nothing else is done
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, Proxy)}
        self.leaf_kwargs.append({name: value for name, value in kwargs.items() if name not in tensors})
        return self.create_proxy("call_function", attention_leaf, (query, key, value), tensors), UnusedWeights()


def _example_of(arg: Any) -> Any:
    return arg.node.meta["example"] if isinstance(arg, Proxy) else arg


def _zeros(example: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(example, device="cpu")


def is_norm(module: torch.nn.Module) -> bool:
    """Whether a module keeps the shape of its input, whatever its kernel: one of Triton cannot run on meta tensors.

    It has no modules of its own: some classes named so hold norms and attention.
    """
    return type(module).__name__.endswith("Norm") and not any(True for _ in module.children())


def opaque(tracer: AttentionTracer, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that a call with proxies is one node of the graph."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []
        map_aggregate((args, kwargs), lambda arg: found.append(arg) if isinstance(arg, Proxy) else None)
        return tracer.create_proxy("call_function", function, args, kwargs) if found else function(*args, **kwargs)

    return call


class InterfaceStub:
    """Answers every look-up of an attention function with the tracer's leaf."""

    def __init__(self, tracer: AttentionTracer) -> None:
        self._leaf = tracer.attention_interface

    def get_interface(self, *_: Any) -> Callable[..., Any]:
        return self._leaf

    def __getitem__(self, _: str) -> Callable[..., Any]:
        return self._leaf


def with_globals(function: types.FunctionType, overlay: dict[str, Any]) -> types.FunctionType:
    """The same function over its own globals, some of them replaced; nobody else sees the replacement."""
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **overlay},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def traceable(tracer: AttentionTracer, forward: Callable[..., Any]) -> types.FunctionType:
    """An attention module's forward, prepared for tracing; its decorators are left out."""
    function = inspect.unwrap(forward)
    overlay: dict[str, Any] = {
        name: opaque(tracer, value)
        for name in function.__code__.co_names
        if inspect.isfunction(value := function.__globals__.get(name)) and value.__module__ != "builtins"
    }
    rotary = function.__globals__.get("apply_rotary_pos_emb")
    if inspect.isfunction(rotary) and rotary.__module__ != function.__module__:  # Liger's launches a kernel of Triton
        tracer.replaced_rotary.add(rotary)
    overlay["eager_attention_forward"] = tracer.attention_interface
    overlay["ALL_ATTENTION_FUNCTIONS"] = InterfaceStub(tracer)
    return with_globals(function, overlay)
