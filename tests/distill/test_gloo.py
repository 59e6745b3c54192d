"""gloo listens on an address that the processes of its group can reach."""

import os
import socket

import psutil
import pytest

from distill.process_groups import INTERFACE, interface_towards, listen_towards


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != INTERFACE})
    monkeypatch.setattr("distill.process_groups._chosen", None)


def interfaces() -> dict[str, str]:
    """Names of this machine's interfaces by address."""
    return {
        each.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET
    }


def test_an_address_of_this_machine_is_on_its_own_interface() -> None:
    assert interfaces()["127.0.0.1"] == "lo"
    for address, name in interfaces().items():
        assert interface_towards(address) == name


def test_the_interface_follows_the_address_of_the_group() -> None:
    for address, name in [*interfaces().items(), ("127.0.0.1", "lo")]:
        listen_towards(address)
        assert os.environ[INTERFACE] == name
    listen_towards("no address")
    assert os.environ[INTERFACE] == "lo"


def test_an_interface_set_by_the_user_is_kept() -> None:
    os.environ[INTERFACE] = "eth7"
    listen_towards("127.0.0.1")
    assert os.environ[INTERFACE] == "eth7"
