"""Differences between versions of transformers, each with the condition under which it goes."""

from __future__ import annotations

# transformers < 5.24 calls the KV cache `past_key_values`, later ones `cache` (and rename the old keyword until 5.40).
# Goes when the minimum is 5.24: then only "cache" stays.
CACHE_NAMES = ("cache", "past_key_values")
