"""What a module is by its class, whatever wrapped it: the class below wrappers, its forward, if it is attention."""

from __future__ import annotations

import inspect

from torch import nn


def base_class(module: nn.Module) -> type[nn.Module]:
    """The module's class below those that swap classes: FSDP2 (``torch.distributed``) and `install` subclass it."""

    def wraps(cls: type) -> bool:
        wrappers = (cls, *cls.__bases__)
        return "_augtree_base" in cls.__dict__ or any(x.__module__.startswith("torch.distributed") for x in wrappers)

    return next(cls for cls in type(module).__mro__ if not wraps(cls))


def bound_forwards(module: nn.Module) -> list[str]:
    """Attributes of an instance that hold its class's forward, bound: accelerate's device hooks keep it in one."""
    held = ((name, vars(module).get(name)) for name in ("_old_forward", "forward"))
    return [name for name, value in held if getattr(value, "__func__", None) is type(module).forward]


def hides_forward(module: nn.Module) -> bool:
    """Whether an instance has a forward of its own which is not known to call that of its class."""
    return "forward" in vars(module) and not bound_forwards(module)


def is_attention(module: nn.Module) -> bool:
    """Whether a module calls the attention interface of transformers."""
    code = getattr(inspect.unwrap(base_class(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
