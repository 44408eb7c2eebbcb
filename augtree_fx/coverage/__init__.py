"""What the library does with every causal-LM type of the installed transformers: ``python -m augtree_fx models``."""
