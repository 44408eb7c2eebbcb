"""``python -m augtree_fx verify``: a user's own model and batch, unmodified and transformed, compared in full."""

from __future__ import annotations


class UsageError(ValueError):
    """What was asked for cannot be done as asked; the message says what to write instead. Exit status 2."""
