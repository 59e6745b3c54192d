"""Names only: reading an image raises."""

from __future__ import annotations

from enum import Enum
from typing import NoReturn


class ImageReadMode(Enum):
    UNCHANGED = 0
    RGB = 3


def decode_image(*_args: object, **_kwargs: object) -> NoReturn:
    raise NotImplementedError("images need the real torchvision, not isotherm's stand-in")
