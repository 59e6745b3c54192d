"""Names only: see the parent package."""

from torchvision.transforms.v2 import functional

__all__ = ["functional"]
