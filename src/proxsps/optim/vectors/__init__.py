"""Blocks by torch, for any dtype, memory layout and regulariser: searches for hosts and devices, parts of a plan."""
