"""Names only: transforming an image raises."""

from __future__ import annotations

from enum import Enum
from typing import NoReturn


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(*_args: object, **_kwargs: object) -> NoReturn:
    raise NotImplementedError("images need the real torchvision, not isotherm's stand-in")
