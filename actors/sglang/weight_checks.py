"""Facts about a server that a weight load needs, and checks of tensors before the load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distill.errors import EngineError

Shapes = Mapping[str, tuple[int, ...]]

# Tensor that provides the weights of a tied lm_head, which a bundle does not contain.
_TIED = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """Properties of a server that determine how weights are loaded.

    Attributes:
        ranks: degree of tensor parallelism.
        drafts: True if the server decodes speculatively.
        own_draft: True if the draft is a part of the served model's own checkpoint.
    """

    ranks: int
    drafts: bool
    own_draft: bool

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> ServerFacts:
        draft = info.get("speculative_draft_model_path")
        return cls(
            ranks=int(info.get("tp_size") or 1),
            drafts=info.get("speculative_algorithm") is not None,
            own_draft=draft is None or draft == info.get("model_path"),
        )

    @property
    def has_other_draft(self) -> bool:
        return self.drafts and not self.own_draft

    @property
    def selector(self) -> dict[str, str]:
        """Selector of the server's models that a load updates; a separate draft is excluded.

        A separate draft has tensors of the same names (`layers.0...`), and would load the policy's.
        """
        return {"selector": "all" if self.drafts and self.own_draft else "target"}


def check_shapes(shapes: Shapes, own: Shapes) -> None:
    """Raise EngineError for the first tensor that is unknown, missing, or of another shape."""
    for name, shape in shapes.items():
        if name not in own:
            raise EngineError(f"the bundle holds {name!r}, which the model does not have")
        if shape != own[name]:
            raise EngineError(
                f"{name!r} has shape {shape} in the bundle and {own[name]} in the model"
            )
    for name in own:
        if name not in shapes and not (name.endswith("lm_head.weight") and _TIED in shapes):
            raise EngineError(f"the bundle lacks {name!r}")
