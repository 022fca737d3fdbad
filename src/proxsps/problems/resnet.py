"""Residual networks for small images (He et al., 2016, the section on CIFAR-10), with batch normalisation or without.

A network of depth 6n + 2 has a first convolution, three stages of n blocks with two convolutions each, and a linear
layer on the averages of the last channels. The second and third stage halve the image and double the channels.

Without batch normalisation no layer but the last has a bias, so that the output is almost homogeneous in the weights,
of a degree that grows with the depth: doubling all weights of a ResNet110 multiplies its output by a number with tens
of digits. This makes the network hard to train, and weight decay alone can repair it.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

from proxsps.problems.names import check_depth

STAGES = 3


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut without parameters (option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int, batch_norm: bool) -> None:
        super().__init__()
        self.stride, self.new = stride, outputs - inputs
        self.conv1, self.norm1 = _convolution(inputs, outputs, stride), _norm(outputs, batch_norm)
        self.conv2, self.norm2 = _convolution(outputs, outputs, 1), _norm(outputs, batch_norm)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        """The input itself; where a stage begins, every second pixel of it, and zeros in half of the new channels."""
        if self.stride == 1 and not self.new:
            return x
        return functional.pad(
            x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.new // 2, self.new - self.new // 2)
        )


class ResNet(nn.Module):
    """A residual network for images with three channels, of 32 x 32 pixels or any other size.

    Args:
        depth: 6n + 2 for some n >= 1; He et al. use 20, 32, 44, 56 and 110.
        width: channels of the first stage.
        classes: number of classes.
        batch_norm: normalise after every convolution; without it there are no normalisation layers.

    Convolutions and the last layer start from Kaiming's normal distribution.

    Examples:
        >>> import torch
        >>> from proxsps.problems.resnet import ResNet
        >>> model = ResNet(20, batch_norm=False)
        >>> sum(p.numel() for p in model.parameters()), model(torch.zeros(2, 3, 32, 32)).shape
        (268346, torch.Size([2, 10]))
    """

    def __init__(self, depth: int, width: int = 16, classes: int = 10, batch_norm: bool = True) -> None:
        super().__init__()
        check_depth(depth)
        if width < 1 or classes < 2:
            raise ValueError(f"A ResNet needs width >= 1 and classes >= 2, got {width!r} and {classes!r}.")
        self.conv, self.norm = _convolution(3, width, 1), _norm(width, batch_norm)
        channels = [width] + [width * 2**stage for stage in range(STAGES) for _ in range(depth // 6)]
        blocks = (ResidualBlock(a, b, 1 if a == b else 2, batch_norm) for a, b in pairwise(channels))
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(channels[-1], classes)
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes, (batch, classes), of normalised images, (batch, 3, height, width)."""
        x = functional.relu(self.norm(self.conv(images)))
        scores: Tensor = self.linear(self.blocks(x).mean((2, 3)))
        return scores


def _convolution(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def _norm(channels: int, batch_norm: bool) -> nn.Module:
    return nn.BatchNorm2d(channels) if batch_norm else nn.Identity()


resnet20, resnet32, resnet44, resnet56, resnet110 = (partial(ResNet, depth) for depth in (20, 32, 44, 56, 110))
