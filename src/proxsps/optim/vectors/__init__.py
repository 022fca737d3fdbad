"""Blocks by torch, for any dtype, memory layout and regulariser: what hosts and devices share, and parts of a plan."""
