"""Networks that become smaller: exact zeros, from groups of parameters to a smaller model.

Everything here works with torch alone, except what finds out which channels belong together (`torch-pruning`), writes
safetensors files, or hands out data frames: `pip install proxsps[sparsity]`.
"""

from proxsps.regularizers.units import UnitLasso, UnitTensor
from proxsps.sparsity.export import load_sparse, save_sparse, to_csr
from proxsps.sparsity.groups import ParameterGroups, rows, sparse_groups
from proxsps.sparsity.inputs import TraceError
from proxsps.sparsity.report import SparsityReport, sparsity_report
from proxsps.sparsity.shrinking import ShrinkError, ShrinkReport, load_shrunk, shrink
from proxsps.sparsity.units import Units, find_units, unit_groups

__all__ = [
    "ParameterGroups",
    "ShrinkError",
    "ShrinkReport",
    "SparsityReport",
    "TraceError",
    "UnitLasso",
    "UnitTensor",
    "Units",
    "find_units",
    "load_shrunk",
    "load_sparse",
    "rows",
    "save_sparse",
    "shrink",
    "sparse_groups",
    "sparsity_report",
    "to_csr",
    "unit_groups",
]
