"""Training networks on images: one run (`loop`), its checkpoints, several processes or devices, and `proxsps train`."""

from proxsps._install import require as _require

_require("proxsps.training", "experiments", "filelock", "pandas", "pyarrow")

from proxsps.sweep.loop import Watch  # noqa: E402
from proxsps.training.checkpoint import CheckpointError  # noqa: E402
from proxsps.training.loop import Training, train  # noqa: E402

__all__ = ["CheckpointError", "Training", "Watch", "train"]
