"""Single zeros on disk: sparse tensors in compressed rows, and a safetensors file that leaves zeros out."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from proxsps import _install
from proxsps._files import replace_file

FORMAT = "proxsps-sparse-1"


class Size(NamedTuple):
    """Bytes of a model on disk."""

    dense: int
    sparse: int
    nonzero: float  # share of entries that are not zero

    def __str__(self) -> str:
        share = self.sparse / self.dense
        return f"{self.sparse:,} bytes instead of {self.dense:,} ({share:.1%}); {self.nonzero:.1%} of entries not zero"


def to_csr(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model as torch's sparse CSR tensors; weights with more than two dims as (rows, all the rest)."""
    return {name: _csr(param.detach()) for name, param in model.named_parameters() if param.ndim >= 2}


def save_sparse(model: nn.Module, path: str | Path) -> Size:
    """Write all tensors of a model to a safetensors file; tensors with many zeros are written without zeros.

    `load_sparse` reads it back as a `state_dict`. Returns the size on disk, next to that of the dense tensors.

    Examples:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from proxsps.sparsity import load_sparse, save_sparse
        >>> model = torch.nn.Linear(100, 100)
        >>> _ = model.weight.data[1:].zero_()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     size = save_sparse(model, Path(folder) / "model.safetensors")
        ...     state = load_sparse(Path(folder) / "model.safetensors")
        >>> size.dense, size.sparse < 3000, torch.equal(state["weight"], model.weight)
        (40400, True, True)
    """
    safetensors = load_safetensors()
    tensors, about = {}, {}
    dense = entries = nonzero = 0
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().cpu().contiguous()
        dense += tensor.numel() * tensor.element_size()
        entries, nonzero = entries + tensor.numel(), nonzero + int(torch.count_nonzero(tensor))
        parts = _compressed(tensor)
        if parts is None:
            tensors[name] = tensor.clone()  # safetensors does not write shared memory
            continue
        about[name] = list(tensor.shape)
        tensors |= {f"{name}:{key}": part for key, part in parts.items()}
    content = safetensors.save(tensors, {"format": FORMAT, "sparse": json.dumps(about)})
    replace_file(Path(path), content)
    return Size(dense, len(content), nonzero / max(entries, 1))


def load_sparse(path: str | Path) -> dict[str, Tensor]:
    """The `state_dict` that `save_sparse` wrote, dense."""
    load_safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {error}.") from None
    if about.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by save_sparse; read it with safetensors.torch.load_file.")
    for name, shape in json.loads(about["sparse"]).items():
        rows, columns, values = (tensors.pop(f"{name}:{key}") for key in ("rows", "columns", "values"))
        tensors[name] = _expanded(shape, rows, columns, values)
    return tensors


def load_safetensors() -> ModuleType:
    """safetensors, or an error that says how to get it."""
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError(f"Writing files of sparse tensors needs safetensors: {_install.extra('sparsity')}.") from None
    return safetensors.torch


def _csr(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return tensor.reshape(len(tensor), -1).to_sparse_csr()


def _compressed(tensor: Tensor) -> dict[str, Tensor] | None:
    """Row counts, column indices and values of a tensor with many zeros; None if that takes more room."""
    if tensor.ndim < 2 or not tensor.numel():
        return None
    csr = _csr(tensor)
    # How many entries each row has, not where they begin: smaller numbers, so smaller types.
    parts = {"rows": csr.crow_indices().diff(), "columns": csr.col_indices()}
    parts = {key: part.to(_index_type(int(part.max()) if part.numel() else 0)) for key, part in parts.items()}
    parts["values"] = csr.values()
    size = sum(part.numel() * part.element_size() for part in parts.values())
    return parts if size < tensor.numel() * tensor.element_size() else None


def _index_type(largest: int) -> torch.dtype:
    return next(
        kind for kind in (torch.uint8, torch.int16, torch.int32, torch.int64) if largest <= torch.iinfo(kind).max
    )


def _expanded(shape: list[int], counts: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    dense = values.new_zeros(shape[0], math.prod(shape[1:]))
    rows = torch.repeat_interleave(torch.arange(shape[0]), counts.long())
    dense[rows, columns.long()] = values
    return dense.reshape(shape)


__all__ = ["Size", "load_safetensors", "load_sparse", "save_sparse", "to_csr"]
