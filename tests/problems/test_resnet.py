"""Residual networks against their counts in the literature and a second, plain definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import batch_norm, conv2d, relu

from proxsps.problems.resnet import ResidualBlock, ResNet, resnet20, resnet32, resnet44, resnet56, resnet110


@pytest.mark.parametrize(
    ("make", "millions"), [(resnet20, 0.27), (resnet32, 0.46), (resnet44, 0.66), (resnet56, 0.85), (resnet110, 1.7)]
)
def test_parameters_are_those_of_the_literature(make, millions):
    """Table 6 of He et al., in millions, to two digits; shortcuts have no parameters."""
    count = sum(p.numel() for p in make().parameters())
    assert float(f"{count / 1e6:.2g}") == millions


@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("depth", [8, 20])
def test_parameters_by_hand(depth, width):
    n = (depth - 2) // 6
    convolutions = 3 * 9 * width
    inputs = width
    for outputs in (width, 2 * width, 4 * width):
        convolutions += 9 * (inputs * outputs + (2 * n - 1) * outputs**2)
        inputs = outputs
    channels = width + 2 * n * 7 * width  # outputs of all convolutions: a scale and a shift each
    linear = 4 * width * 7 + 7
    plain, normalised = (ResNet(depth, width, 7, norm) for norm in (False, True))
    assert sum(p.numel() for p in plain.parameters()) == convolutions + linear
    assert sum(p.numel() for p in normalised.parameters()) == convolutions + linear + 2 * channels
    assert not [m for m in plain.modules() if "Norm" in type(m).__name__]
    assert [name for name, _ in plain.named_parameters() if name.endswith("bias")] == ["linear.bias"]


def plain_forward(model: ResNet, x: torch.Tensor, depth: int) -> torch.Tensor:
    """The network once more, from its named parameters, pixel by pixel where a shortcut changes shape."""
    state = dict(model.named_parameters())

    def convolved(x: torch.Tensor, name: str, stride: int = 1) -> torch.Tensor:
        out = conv2d(x, state[f"{name}.weight"], stride=stride, padding=1)
        norm = name.replace("conv", "norm")
        if f"{norm}.weight" in state:
            out = batch_norm(out, None, None, state[f"{norm}.weight"], state[f"{norm}.bias"], training=True)
        return out

    x = relu(convolved(x, "conv"))
    for i in range(depth // 6 * 3):
        stride = 2 if i in (depth // 6, depth // 6 * 2) else 1
        inner = relu(convolved(x, f"blocks.{i}.conv1", stride))
        inner = convolved(inner, f"blocks.{i}.conv2")
        short = x
        if stride == 2:
            short = torch.zeros_like(inner)
            channels = x.shape[1]
            for row in range(inner.shape[2]):
                for column in range(inner.shape[3]):
                    short[:, channels // 2 : channels // 2 + channels, row, column] = x[:, :, 2 * row, 2 * column]
        x = relu(inner + short)
    return x.flatten(2).mean(2) @ state["linear.weight"].T + state["linear.bias"]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("depth", [8, 14])
def test_forward_is_the_definition(depth, norm):
    torch.manual_seed(0)
    model = ResNet(depth, 4, 5, norm).double()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain_forward(model, x, depth), rtol=1e-10, atol=1e-10)


def test_the_shortcut_has_zeros_in_half_of_the_new_channels():
    x = torch.arange(2 * 4 * 4, dtype=torch.float32).reshape(1, 2, 4, 4) + 1
    out = ResidualBlock(2, 4, 2, False).shortcut(x)
    assert out.shape == (1, 4, 2, 2)
    assert not out[:, [0, 3]].any()
    np.testing.assert_array_equal(out[0, 1], [[1, 3], [9, 11]])
    assert ResidualBlock(2, 2, 1, False).shortcut(x) is x


def test_the_start_is_kaiming_normal():
    torch.manual_seed(0)
    weights = [layer.weight for layer in resnet56(batch_norm=False).modules() if hasattr(layer, "weight")]
    scaled = torch.cat([(w * (w[0].numel() / 2) ** 0.5).flatten() for w in weights])
    assert abs(scaled.mean()) < 0.01  # 850,000 standard normal numbers
    assert abs(scaled.std() - 1) < 0.01
    assert abs((scaled.abs() < 1).float().mean() - 0.6827) < 0.01


def test_without_batch_norm_the_output_is_almost_homogeneous():
    """Weights times 2 give 2^L times the output on the longest path: the reason why depth is hard."""
    torch.manual_seed(0)
    model = ResNet(20, 4, batch_norm=False).double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        model.linear.bias.zero_()
        before = model(x).norm()
        for p in model.parameters():
            p.mul_(2)
        assert model(x).norm() > 2**10 * before


@pytest.mark.parametrize(
    "options", [{"depth": 19}, {"depth": 2}, {"depth": 20, "width": 0}, {"depth": 8, "classes": 1}]
)
def test_impossible_networks_are_refused(options):
    with pytest.raises(ValueError, match=r"6n \+ 2|width >= 1"):
        ResNet(**options)
