"""Passes over all parameters at once on the CPU, compiled by numba (extra `fast`) and cached on disk.

`sums` and `write` are for blocks with an affine step, and `moments` has passes that also update averages of gradients.
`entries` and `rows` are for blocks whose prox acts on single entries, or on the norms of rows; their slope is the
gradient, or an average that is updated in the same pass. `metric_rows` is for norms of rows in Adam's metric.
"""

from proxsps.optim.kernels import entries, metric_rows, moments, rows
from proxsps.optim.kernels.layout import Memory, memory
from proxsps.optim.kernels.lines import sums, write
from proxsps.optim.kernels.sampling import Start, start_of
from proxsps.optim.kernels.scalar import Psi

__all__ = ["Memory", "Psi", "Start", "entries", "memory", "metric_rows", "moments", "rows", "start_of", "sums", "write"]
