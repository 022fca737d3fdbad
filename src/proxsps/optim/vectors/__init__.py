"""The parts of a plan by torch on the host: any dtype, memory layout and regulariser."""

from proxsps.optim.vectors.entries import EntryPart
from proxsps.optim.vectors.proxes import ProxPart
from proxsps.optim.vectors.rows import RowPart
from proxsps.optim.vectors.spectral import SpectralPart

__all__ = ["EntryPart", "ProxPart", "RowPart", "SpectralPart"]
