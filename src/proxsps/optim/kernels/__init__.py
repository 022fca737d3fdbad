"""Passes over all parameters at once on the CPU, compiled by numba (extra `fast`) and cached on disk.

`sums` and `write` are those of blocks with an affine step; `entries` and `rows` have those of blocks whose prox acts on
single entries, or on the norms of rows. All of them read the slope d, which is the gradient or a tensor of the state.
"""

from proxsps.optim.kernels import entries, rows
from proxsps.optim.kernels.layout import Memory, memory
from proxsps.optim.kernels.lines import sums, write
from proxsps.optim.kernels.scalar import Psi

__all__ = ["Memory", "Psi", "entries", "memory", "rows", "sums", "write"]
