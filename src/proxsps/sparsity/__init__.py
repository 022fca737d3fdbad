"""Networks that become smaller: exact zeros, from groups of parameters to a smaller model.

Everything here works with torch alone, except what finds out which channels belong together (`torch-pruning`), writes
safetensors files, or hands out data frames: `pip install proxsps[sparsity]`.
"""

from proxsps.regularizers.units import UnitLasso, UnitTensor
from proxsps.sparsity.groups import ParameterGroups, rows, sparse_groups

__all__ = ["ParameterGroups", "UnitLasso", "UnitTensor", "rows", "sparse_groups"]
