"""Training networks on images: one run (`loop`), its checkpoints, several processes or devices, and `proxsps train`."""

from proxsps.training.checkpoint import CheckpointError
from proxsps.training.engine import Training
from proxsps.training.loop import Watch, train

__all__ = ["CheckpointError", "Training", "Watch", "train"]
