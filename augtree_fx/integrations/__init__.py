"""Trainers, one module each: `trl`, `verl`, `openrlhf`. Nothing here imports a trainer before it is asked to."""
