"""Many runs of one problem: what to run (`spec`), how (`engines`) and where results are kept (`store`).

`grid` lists runs, `run_sweep` runs them and returns tables. Methods are those of `proxsps.methods`.
"""

from typing import TYPE_CHECKING

from proxsps._install import require as _require
from proxsps._lazy import attach as _attach
from proxsps.methods import Method

if TYPE_CHECKING:
    from proxsps.sweep.engines import Batched, Processes, Single, Tables, run_sweep
    from proxsps.sweep.ray import Ray
    from proxsps.sweep.spec import RunSpec, grid
    from proxsps.sweep.store import Store

_require("proxsps.sweep", "experiments", "filelock", "pandas", "pyarrow")

__all__ = ["Batched", "Method", "Processes", "Ray", "RunSpec", "Single", "Store", "Tables", "grid", "run_sweep"]

_OF_ENGINES = dict.fromkeys(("Batched", "Processes", "Single", "Tables", "run_sweep"), "engines")
_OTHERS = {"Ray": "ray", "RunSpec": "spec", "Store": "store", "grid": "spec"}
__getattr__, __dir__ = _attach(__name__, _OF_ENGINES | _OTHERS)
