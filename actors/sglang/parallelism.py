"""Numbers of GPUs and nodes of one SGLang server, parsed from its flags."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from actors.sglang.flags import Flags, parse_flags
from distill.errors import ConfigError

_TENSOR = ("--tp-size", "--tp", "--tensor-parallel-size")
_PIPELINE = ("--pp-size", "--pp", "--pipeline-parallel-size")
_DATA = ("--dp-size", "--dp", "--data-parallel-size")


class Parallelism(NamedTuple):
    """Degrees of parallelism of one server.

    Attributes:
        tensor, pipeline: numbers of ranks over which one copy of the model is split.
        data: number of copies; with `data_attention` of the attention layers only, among the
            tensor ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    data_attention: bool = False
    nodes: int = 1

    @property
    def gpus(self) -> int:
        return self.split * (1 if self.data_attention else self.data)

    @property
    def split(self) -> int:
        """Number of GPUs over which one copy of the weights is split."""
        return self.tensor * self.pipeline

    @property
    def gpus_a_node(self) -> int:
        return self.gpus // self.nodes


def parallelism(text: str, setting: str = "server_flags") -> Parallelism:
    """Parse the parallelism of a server from its flags.

    Args:
        setting: name of the setting that holds the flags, for errors.

    Raises:
        ConfigError: as `parse_flags`; or a value is not a number above 0.
    """
    flags = parse_flags(text, setting)
    number = partial(_number, setting, flags)
    return Parallelism(
        tensor=number(*_TENSOR),
        pipeline=number(*_PIPELINE),
        data=number(*_DATA),
        data_attention="--enable-dp-attention" in flags,
        nodes=number("--nnodes"),
    )


def _number(setting: str, flags: Flags, *names: str) -> int:
    for name in names:
        if name in flags:
            value = " ".join(flags[name])
            if not value.isdecimal() or int(value) < 1:
                raise ConfigError(
                    f"{setting}: {name} {value!r} must be a number above 0", field=setting
                )
            return int(value)
    return 1


def check_hosted(setting: str, text: str) -> None:
    """Raise ConfigError if the server's GPUs cannot be split evenly over nodes, as SGLang requires.

    Replicas (--dp-size) cannot be spread over nodes, except with --enable-dp-attention.
    """
    found = parallelism(text, setting)
    if found.nodes == 1:
        return
    if found.data > 1 and not found.data_attention:
        raise ConfigError(
            f"{setting} --nnodes {found.nodes} --dp-size {found.data}: SGLang cannot spread "
            "replicas over nodes; use more engines instead, or --enable-dp-attention",
            field=setting,
        )
    if found.split % found.nodes:
        raise ConfigError(
            f"{setting} --nnodes {found.nodes}: {found.split} GPUs (--tp-size x --pp-size) cannot "
            "be split evenly over the nodes; use a --tp-size that --nnodes divides",
            field=setting,
        )


def check_pushed(setting: str, text: str) -> None:
    """Raise ConfigError for a server that a weight push cannot update completely.

    SGLang numbers the ranks of a push by tensor parallelism only, and rejects a push if there are
    replicas (managers/tokenizer_control_mixin.py: dp_size == 1, except for attention).
    """
    found = parallelism(text, setting)
    if found.pipeline > 1:
        raise ConfigError(
            f"{setting} --pp-size {found.pipeline}: weights cannot be pushed into a pipeline; "
            "use --tp-size instead",
            field=setting,
        )
    if found.data > 1 and not found.data_attention:
        raise ConfigError(
            f"{setting} --dp-size {found.data}: weights cannot be pushed into a server of several "
            f"replicas; use policy.engines={found.data} instead, or --enable-dp-attention",
            field=setting,
        )
