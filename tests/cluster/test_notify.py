"""Notifications to a server and to a function: in order, and the run never waits for them."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.config.output import TrackingSettings
from cluster.inspect.report.data import report_data
from cluster.inspect.report.run_files import read_run
from cluster.run_files.notify import Notifier, receiver_of
from distill.errors import ConfigError
from tests.conftest import TinyPair
from tests.e2e.harness import train
from tests.refusals import refuses
from tests.rows import read_rows

heard: list[dict[str, Any]] = []
released = threading.Event()


def hear(body: dict[str, Any]) -> None:
    heard.append(body)


def hang(_told: dict[str, Any]) -> None:
    released.wait(60)


def leave(body: dict[str, Any]) -> None:
    heard.append(body)
    raise SystemExit("gone")


def constant_reward(_response: str, _answer: str) -> float:
    return 0.0


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    heard.clear()
    released.clear()
    yield
    released.set()


class Server:
    """A server on the loopback address that answers POSTs with `status`."""

    def __init__(self, status: int = 200, location: str | None = None) -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        got = self.got

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                got.append((self.headers["Content-Type"], json.loads(body)))
                self.send_response(status)
                if location is not None:
                    self.send_header("Location", location)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Write no log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook?key=1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def servers() -> Iterator[dict[int, Server]]:
    made = {status: Server(status) for status in (200, 500)}
    made[302] = Server(302, made[200].url)
    yield made
    for server in made.values():
        server.close()


def test_a_run_sends_its_findings_and_its_end(
    tiny_pair: TinyPair, tmp_path: Path, servers: dict[int, Server]
) -> None:
    """A finding about a constant reward reaches server, events, console and report."""
    out = tmp_path / "run"
    printed = tmp_path / "printed"
    with printed.open("w") as file:
        train(
            "rl", out, console=Console(file=file, width=1000), student=tiny_pair.student,
            prompts=tiny_pair.prompts, temperature=0.7, steps=12, prompts_per_step=2, group_size=2,
            max_new_tokens=4, eval_size=0, engine="embedded", local=True, lr=1e-3,
            smoke_test=False, reward=f"{__name__}:constant_reward", notify=servers[200].url,
        )  # fmt: skip
    events = read_rows(out / "events.jsonl")
    findings = {event["name"]: event for event in events if event["event"] == "finding"}
    constant = findings["rewards_are_constant"]
    assert constant["step"] == 8
    bodies = [body for _, body in servers[200].got]
    assert [body.get("name") for body in bodies] == [*findings, None]
    assert {kind for kind, _ in servers[200].got} == {"application/json"}
    [body] = [body for body in bodies if body.get("name") == "rewards_are_constant"]
    assert body["run"] == "run" and body["remedy"] == constant["remedy"]
    assert body["evidence"] == constant["evidence"] and constant["evidence"]["step"] == 1
    assert body["text"] in printed.read_text()
    end = {"event": "end", "run": "run", "out": str(out), "step": 12, "status": "finished"}
    assert bodies[-1].items() >= end.items()
    shown = report_data(read_run(out), 1)
    assert [each["name"] for each in shown["findings"]] == list(findings)
    kept = {(group["step"], group["group"]) for group in shown["groups"]}
    where = constant["evidence"]
    assert (where["step"], where["group"]) in kept


def notified(receiver: Any, **end: float) -> list[str]:
    """Warnings of a failed run of three steps that notifies this receiver."""
    lines: list[str] = []
    notifier = Notifier(receiver, Path("/runs/first"), lines.append, **end)
    for step in (1, 2, 3):
        notifier.send("finding", text=f"step {step}", step=step)
    notifier.finish({"status": "failed", "reason": "RunFailed: no"}, 3)
    return lines


def test_a_function_gets_all_notifications_in_order() -> None:
    assert notified(receiver_of(f"{__name__}:hear")) == []
    assert [body["text"] for body in heard[:3]] == ["step 1", "step 2", "step 3"]
    assert heard[3]["status"] == "failed" and heard[3]["reason"] == "RunFailed: no"


def test_a_failing_receiver_is_warned_of_once_and_still_notified(
    servers: dict[int, Server],
) -> None:
    [line] = notified(receiver_of(servers[500].url))
    assert "500" in line and len(servers[500].got) == 4
    [line] = notified(receiver_of(f"{__name__}:leave"))
    assert "SystemExit: gone" in line and len(heard) == 4
    [line] = notified(receiver_of(servers[302].url))
    assert "302" in line and len(servers[200].got) == 0  # redirects are not followed
    servers[200].close()
    assert len(notified(receiver_of(servers[200].url))) == 1


def test_a_receiver_that_hangs_does_not_delay_the_end() -> None:
    assert len(notified(receiver_of(f"{__name__}:hang"), end_s=0.2)) == 1


@pytest.mark.parametrize(
    "notify",
    ["https:///path", "https://h[/x", "https://host:99999/x", "https://me:secret@host/path",
     "https://me:secret@h[/path", "somewhere", f"{__name__}:nothing", f"{__name__}:heard"],
)  # fmt: skip
def test_an_invalid_receiver_is_refused_without_its_secret(notify: str) -> None:
    with refuses(ConfigError, "tracking.notify") as caught:
        receiver_of(TrackingSettings(notify=notify).notify)
    assert "secret" not in str(caught.value)
