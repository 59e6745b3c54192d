"""Meeting point of the ranks of a server on several nodes (`--nnodes`).

    node 0        HostedSglangEngine: opens the store and runs the HTTP server
    other nodes   SglangFollower: runs SGLang's ranks on that node, which take no requests

SGLang's rank 0 would open the store at a port that was chosen minutes before, and listen on all
addresses. `RanksStore` listens on the address of the node only, before other nodes get the address.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

from actors.sglang.server import claim_port
from distill.errors import EngineError
from distill.gloo import INTERFACE, interface_towards

# With data-parallel attention SGLang also binds ports after the store's port (server_args.py:
# NUM_DERIVED_PORTS = 6).
_FOLLOWING_PORTS = 8
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """Address and port of the store of a server's ranks, on node 0."""

    address: str
    port: int

    def flags(self, node: int) -> list[str]:
        """SGLang's flags for the processes of one node."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return ["--node-rank", str(node), "--dist-init-addr", f"{host}:{self.port}"]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make every rank join the store, and no rank open one."""
        variables = {
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "env://",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        interface = interface_towards(self.address)
        if interface is not None and INTERFACE not in os.environ:
            variables[INTERFACE] = interface
        return variables


class RanksStore:
    """Rendezvous store for the ranks of a server on several nodes; closed with this object.

    Raises:
        EngineError: there are not enough consecutive free ports at this address.
    """

    def __init__(self, address: str, deadline_s: float) -> None:
        # Imported here: followers only use MeetingPoint, and start a server before they import
        # torch.
        from torch.distributed import (
            TCPStore,  # pyright: ignore[reportPrivateImportUsage] - public
        )

        listener, *self._following = _claim_in_a_row(address, 1 + _FOLLOWING_PORTS)
        listener.listen()
        self.point = MeetingPoint(address=address, port=listener.getsockname()[1])
        self._store = TCPStore(
            address,
            self.point.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_s),
            master_listen_fd=listener.detach(),
        )


def _claim_in_a_row(address: str, count: int) -> list[socket.socket]:
    """Claim `count` consecutive ports."""
    for _ in range(_ATTEMPTS):
        claims = [claim_port(address)]
        first = claims[0].getsockname()[1]
        try:
            claims += [claim_port(address, first + i) for i in range(1, count)]
        except (OSError, OverflowError):  # a port is taken, or above 65535
            for claim in claims:
                claim.close()
            continue
        return claims
    raise EngineError(f"no {count} consecutive free ports at {address} after {_ATTEMPTS} attempts")
