"""Single zeros on disk: what comes back is what was written, and it is smaller."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from proxsps.sparsity import load_sparse, save_sparse, to_csr


@pytest.fixture
def model(kit):
    model = kit.convolutional()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                keep = torch.rand(param.shape, generator=torch.Generator().manual_seed(0)) < 0.1
                param.mul_(keep)
    return model


def test_csr_tensors_hold_the_same_numbers(model):
    sparse = to_csr(model)
    assert set(sparse) == {name for name, param in model.named_parameters() if param.ndim > 1}
    for name, param in model.named_parameters():
        if name in sparse:
            assert sparse[name].layout is torch.sparse_csr
            assert torch.equal(sparse[name].to_dense(), param.detach().reshape(len(param), -1))
            assert sparse[name].values().numel() == int((param != 0).sum())


def test_a_file_is_smaller_and_comes_back_bit_by_bit(model, tmp_path):
    file = tmp_path / "model.safetensors"
    size = save_sparse(model, file)
    assert size.sparse == file.stat().st_size
    assert size.dense == sum(t.numel() * t.element_size() for t in model.state_dict().values())
    state = load_sparse(file)
    assert set(state) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor)
    model.load_state_dict(state)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_large_sparse_layers_take_a_share_of_the_room(dtype, tmp_path):
    layer = nn.Linear(700, 300).to(dtype)
    with torch.no_grad():
        layer.weight.mul_(torch.rand(300, 700) < 0.05)
    size = save_sparse(layer, tmp_path / "a.safetensors")
    assert size.sparse < 0.15 * size.dense
    assert 0.04 < size.nonzero < 0.07
    assert torch.equal(load_sparse(tmp_path / "a.safetensors")["weight"], layer.weight)
    assert "bytes instead of" in str(size)


def test_dense_tensors_and_tied_ones_are_written_too(tmp_path):
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].weight = model[0].weight
    save_sparse(model, tmp_path / "a.safetensors")
    state = load_sparse(tmp_path / "a.safetensors")
    assert torch.equal(state["1.weight"], model[0].weight)


def test_files_of_others(tmp_path):
    (tmp_path / "bad").write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match="is not a safetensors file, or is damaged"):
        load_sparse(tmp_path / "bad")
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(ValueError, match="was not written by save_sparse"):
        load_sparse(tmp_path / "other")
