"""Networks that become smaller: exact zeros, from groups of parameters to a smaller model.

Everything works with torch alone, except finding the channels that belong together (`torch-pruning`), writing
safetensors files, and returning data frames: these need the extra `sparsity`.
"""

from proxsps.regularizers.units import UnitLasso, UnitTensor
from proxsps.sparsity.counts import SparsityReport, sparsity_report
from proxsps.sparsity.export import load_sparse, save_sparse, to_csr
from proxsps.sparsity.groups import ParameterGroups, rows, sparse_groups
from proxsps.sparsity.inputs import TraceError
from proxsps.sparsity.path import PathError, StrengthPath, strength_path
from proxsps.sparsity.shrinking import ShrinkError, ShrinkReport, load_shrunk, shrink
from proxsps.sparsity.units import Units, clear_dead, find_units, unit_groups

__all__ = [
    "ParameterGroups",
    "PathError",
    "ShrinkError",
    "ShrinkReport",
    "SparsityReport",
    "StrengthPath",
    "TraceError",
    "UnitLasso",
    "UnitTensor",
    "Units",
    "clear_dead",
    "find_units",
    "load_shrunk",
    "load_sparse",
    "rows",
    "save_sparse",
    "shrink",
    "sparse_groups",
    "sparsity_report",
    "strength_path",
    "to_csr",
    "unit_groups",
]
