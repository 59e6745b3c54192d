"""Parameters that a server builds from the tensors it receives: fused, and split among ranks.

A server reports digests of its own parameters by rank; the learner has the checkpoint's tensors.
`find_shard_rules` finds for each parameter the rule that builds it from these tensors, by comparing
digests. A parameter without a rule (because the server quantises or packs it) stays unproven.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from distill.weights.digests import TensorDigests, digest
from distill.weights.model_weights import COPY_BYTES, Weights

# One mapping per rank: digest of each parameter, by name.
Digests = Sequence[Mapping[str, str]]
Cut = Literal["whole", "rows", "columns", "vocabulary"]

# Parameters that servers fuse, with the names of their parts.
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# SGLang pads a vocabulary with rows of zeros to a multiple of this number.
_VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRule:
    """Rule by which a rank of a server builds one parameter from tensors that are sent.

    Attributes:
        sources: names of the tensors, which are concatenated in this order.
        cut: part of each tensor that a rank holds.
        sharers: number of ranks that hold the same rows of all sources except the first (keys and
            values, which may have fewer heads than there are ranks).
    """

    sources: tuple[str, ...]
    cut: Cut
    sharers: int = 1

    def make(self, tensors: Mapping[str, Tensor], rank: int, ranks: int) -> Tensor | None:
        """Build the parameter of a rank; None if the tensors' shapes do not allow this cut."""
        parts = []
        for i, name in enumerate(self.sources):
            sharers = self.sharers if i else 1
            part = _cut(tensors[name], self.cut, rank // sharers, ranks // sharers)
            if part is None:
                return None
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cut(tensor: Tensor, cut: Cut, rank: int, ranks: int) -> Tensor | None:
    if cut == "whole":
        return tensor
    dim = 1 if cut == "columns" else 0
    if tensor.dim() <= dim:
        return None
    if cut == "vocabulary":
        missing = -len(tensor) % _VOCABULARY_MULTIPLE
        tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
    if tensor.shape[dim] % ranks:
        return None
    return tensor.chunk(ranks, dim)[rank]


def candidates(parameter: str, sent: set[str], ranks: int) -> list[ShardRule]:
    """Rules that may build the parameter from tensors of these names, the likeliest first."""
    sources = _sources(parameter, sent)
    if sources is None:
        return []
    cuts: tuple[Cut, ...] = ("whole", "vocabulary")
    if len(sources) > 1:
        cuts = ("whole",) if ranks == 1 else ("rows",)
    elif ranks > 1:
        cuts = ("rows", "columns", "whole", "vocabulary")
    made = [ShardRule(sources=sources, cut=cut) for cut in cuts]
    if len(sources) == 3:
        made += [replace(made[0], sharers=n) for n in range(2, ranks + 1) if ranks % n == 0]
    return made


def _sources(parameter: str, sent: set[str]) -> tuple[str, ...] | None:
    if parameter in sent:
        return (parameter,)
    for fused, parts in _FUSED.items():
        names = tuple(parameter.replace(f".{fused}.", f".{part}.") for part in parts)
        if f".{fused}." in parameter and sent.issuperset(names):
            return names
    return None


def find_shard_rules(served: Digests, weights: Weights) -> dict[str, ShardRule]:
    """Find the shard rule of each parameter; parameters without a rule are left out.

    A rule that reproduces the digests of more than half of a kind (the same parameter of all
    layers) is used for the whole kind: the rest of the kind holds other weights.
    """
    sent = {layout.name for layout in weights.layouts}
    ways = {name: candidates(name, sent, len(served)) for name in served[0]}
    found: dict[str, ShardRule] = {}
    for names, tensors in _gathered({n: w[0].sources for n, w in ways.items() if w}, weights):
        for name in names:
            for rule in ways[name]:
                if all(_gives(rule, tensors, name, served, rank) for rank in range(len(served))):
                    found[name] = rule
                    break
    return found | _by_kind(found, ways)


def _gives(
    rule: ShardRule, tensors: Mapping[str, Tensor], name: str, served: Digests, rank: int
) -> bool:
    made = rule.make(tensors, rank, len(served))
    return made is not None and digest(made) == served[rank].get(name)


def _by_kind(
    found: Mapping[str, ShardRule], ways: Mapping[str, Sequence[ShardRule]]
) -> dict[str, ShardRule]:
    kinds = Counter(map(_kind, ways))
    cuts = Counter((_kind(name), rule.cut, rule.sharers) for name, rule in found.items())
    usual = {
        kind: (cut, sharers)
        for (kind, cut, sharers), times in cuts.items()
        if 2 * times > kinds[kind]
    }
    return {
        name: replace(ways[name][0], cut=usual[_kind(name)][0], sharers=usual[_kind(name)][1])
        for name in ways
        if name not in found and ways[name] and _kind(name) in usual
    }


def _kind(parameter: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", parameter)


def expected_digests(rules: Mapping[str, ShardRule], weights: Weights, ranks: int) -> Digests:
    """Digests by rank that a server with these weights reports for the parameters in `rules`."""
    places: list[tuple[int, str]] = []
    digests = TensorDigests()
    for names, tensors in _gathered({n: r.sources for n, r in rules.items()}, weights):
        for name in names:
            for rank in range(ranks):
                part = rules[name].make(tensors, rank, ranks)
                assert part is not None, f"{name} was cut so before"
                digests.add(part)
                places.append((rank, name))
    made: list[dict[str, str]] = [{} for _ in range(ranks)]
    for (rank, name), found in zip(places, digests.read(), strict=True):
        made[rank][name] = found
    return made


def _gathered(
    sources: Mapping[str, Sequence[str]], weights: Weights
) -> Iterator[tuple[list[str], dict[str, Tensor]]]:
    """Yield the parameters in groups of about `COPY_BYTES`, with the full tensors they need."""
    sizes = {layout.name: layout.nbytes for layout in weights.layouts}
    names: list[str] = []
    room = COPY_BYTES
    for name, needed in sources.items():
        size = sum(sizes[source] for source in needed)
        if names and size > room:
            yield names, weights.gather([s for n in names for s in sources[n]])
            names, room = [], COPY_BYTES
        names.append(name)
        room -= size
    if names:
        yield names, weights.gather([s for n in names for s in sources[n]])
