"""A torchvision ResNet-18 whose trunk is given and frozen; clients train a new head together.

    python vision_finetune.py resnet18-f37072fd.pth trunk.safetensors

turns torchvision's file of weights, or any state_dict of that model, into the one that
federation.toml starts from: without its head, which had other classes.
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import resnet18


class Finetuned(nn.Module):
    """Of the parameters only `head` is trained and travels. The trunk's statistics of batch norm
    travel too, as buffers do, and stay as they are given."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.trunk = resnet18()
        self.trunk.fc = nn.Identity()
        self.trunk.requires_grad_(False)
        self.head = nn.Linear(512, num_classes)

    def train(self, mode: bool = True) -> Finetuned:
        super().train(mode)
        self.trunk.eval()  # or its batch norm would learn, and every client's on its own
        return self

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.trunk(images)
        return self.head(features)


def main() -> None:
    source, target = sys.argv[1:]
    state = torch.load(source, weights_only=True)
    trunk = {f"trunk.{n}": v for n, v in state.items() if not n.startswith("fc.")}
    save_file(trunk, target)
    print(f"{target}: {len(trunk)} arrays, without the head's")


if __name__ == "__main__":
    main()
