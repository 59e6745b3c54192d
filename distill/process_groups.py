"""Settings of process groups: gloo's network interface, and what NCCL's members must agree on.

By default, gloo listens on the address of the host's name. Debian and Ubuntu map that name to
127.0.1.1, which no other machine reaches: a group over two machines then waits until its deadline.
Processes on one machine need no address that other machines reach.

Unless the environment sets them, SGLang turns two settings of NCCL off for its servers, while NCCL
turns them on; a group of a server and a learner then hangs or fails. Each process reads them once,
when it opens its first communicator.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import psutil

INTERFACE = "GLOO_SOCKET_IFNAME"
_chosen: str | None = None
_AGREED = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


def listen_towards(address: str) -> None:
    """Make gloo's next groups in this process listen on the interface that leads to `address`.

    An interface that the user's environment names is kept.
    """
    global _chosen
    if os.environ.get(INTERFACE) != _chosen:
        return
    if (found := interface_towards(address)) is not None:
        os.environ[INTERFACE] = _chosen = found


def interface_towards(address: str) -> str | None:
    """Name of this machine's interface that leads to `address`; None if none does."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect((address, 9))  # sends nothing
            own = route.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == family and each.address == own for each in addresses):
            return name
    return None


def nccl_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """NCCL settings for a process with this environment and for the server that it starts."""
    return {name: environment.get(name, value) for name, value in _AGREED.items()}
