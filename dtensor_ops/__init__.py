"""Context parallelism: which rank has which tokens of a tree, collectives, and attention over sharded keys."""
