"""Context parallelism: which rank has which tokens of a tree, collectives, and attention over sharded keys."""

from augtree_fx.dtensor_ops import ops, partials, rules

__all__ = ["ops", "partials", "rules"]
