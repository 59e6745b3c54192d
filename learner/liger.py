"""Liger's Triton kernels in place of a model's norms, rotary embedding and SwiGLU, on CUDA.

Not its fused cross-entropy: that is at temperature 1, and `distill.models.logprobs` has ours.
"""

from __future__ import annotations

from transformers.integrations.liger import apply_liger_kernel
from transformers.modeling_utils import PreTrainedModel

from distill.errors import ConfigError

_KERNELS = {"rope": True, "rms_norm": True, "swiglu": True}
_NOT_OURS = {"cross_entropy": False, "fused_linear_cross_entropy": False}


def use_liger(model: PreTrainedModel) -> None:
    """Switches the model's own modules over. Raises ConfigError if Liger does not know it."""
    before = _forwards(model)
    apply_liger_kernel(model, _KERNELS | _NOT_OURS)
    if _forwards(model) == before:
        raise ConfigError(
            f"liger=True changes nothing: Liger has no kernels for {model.config.model_type!r}; "
            "leave it out",
            field="liger",
        )


def _forwards(model: PreTrainedModel) -> list[object]:
    return [module.forward for module in model.modules()]
