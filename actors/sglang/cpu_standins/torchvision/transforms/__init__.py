"""Names only: transforming an image raises."""

from torchvision.transforms.functional import InterpolationMode, pil_to_tensor

__all__ = ["InterpolationMode", "pil_to_tensor"]
