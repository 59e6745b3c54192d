"""What is known of a server before weights are loaded into it, and what is refused for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distill.errors import EngineError

Shapes = Mapping[str, tuple[int, ...]]

# What a head that is not in a bundle shares its weights with.
_TIED = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a load needs to know of a server.

    Attributes:
        ranks: its tensor parallelism.
        drafts: it decodes speculatively.
        own_draft: the draft is a part of the served model's own checkpoint.
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
        """Which of the server's models a load is for: a draft of its own names has no part in it.

        Such a draft has tensors by the same names (`layers.0...`), and would take the policy's.
        """
        return {"selector": "all" if self.drafts and self.own_draft else "target"}


def check_shapes(shapes: Shapes, own: Shapes) -> None:
    """Raises EngineError: the first tensor that is unknown, of another shape, or missing."""
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
