"""Import-only stand-in for torchvision: what SGLang imports at start and text models never call."""

from torchvision import io, transforms

__version__ = "0.0.0+cpu.standin"
__all__ = ["io", "transforms"]
