"""Benchmarks behind ``python -m augtree_fx bench``: rivals in one run, no ratio without parity of the same inputs."""
