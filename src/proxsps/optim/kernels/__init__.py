"""Passes over all parameters at once on the CPU, compiled by numba and cached on disk."""
