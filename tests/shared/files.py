"""Things written to a file and read again."""

import io
from typing import Any

import torch


def through_disk(thing: Any, weights_only: bool = True) -> Any:
    """What `torch.load` reads from the file that `torch.save` writes."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
