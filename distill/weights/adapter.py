"""A LoRA adapter as it is sent to SGLang servers, which apply it to the base that they hold.

A server has one rank, one scale and one list of adapted modules for the whole adapter
(`AdapterForm`). It compares the SHA-256 of each tensor that arrives with the learner's, and exits
if one differs.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distill.weights.model_weights import HeldWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterForm:
    """Form of an adapter, which all its versions share.

    Attributes:
        alpha: the adapter's output is multiplied by alpha / rank.
        targets: last parts of the adapted modules' names (q_proj), sorted.
        parameters: number of trained numbers.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    parameters: int

    @property
    def config(self) -> dict[str, Any]:
        """The fields of peft's adapter_config.json that a server reads."""
        return {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.targets),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterTensors:
    """Copy of one version of an adapter: a source of weights that an engine receives by value.

    Attributes:
        pickled: pickle of the tensors, by peft's names.
        checksums: SHA-256 of each tensor's bytes, by name.
    """

    form: AdapterForm
    pickled: bytes
    checksums: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AdapterWeights(HeldWeights):
    """An adapter's full tensors under peft's names: pushed instead of the model's `Weights`."""

    form: AdapterForm

    def copied(self) -> AdapterTensors:
        """A copy in main memory, with its checksums."""
        # Cloned, because pickle writes the whole storage of a view.
        copies = {name: tensor.detach().cpu().clone() for name, tensor in self.tensors.items()}
        return AdapterTensors(
            form=self.form,
            pickled=pickle.dumps(copies),
            checksums={name: _sha256(tensor) for name, tensor in copies.items()},
        )


def _sha256(tensor: Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()
