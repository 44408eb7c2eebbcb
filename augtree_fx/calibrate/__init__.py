"""Measuring a machine for the planner: kernels by size, copies, memory, links."""
