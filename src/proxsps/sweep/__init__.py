"""Many runs of one problem: what to run (`spec`), how (`engines`) and where results are kept (`store`)."""

from proxsps._install import require as _require

_require("proxsps.sweep", "experiments", "filelock", "pandas", "pyarrow")
