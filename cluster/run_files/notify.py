"""Notifications of findings and of the run's end, to a URL or to a user's function.

    {"event": "finding", "run": "first", "out": "/.../runs/first", "text": "step 40: the ...",
     "name": "kl_rises", "step": 40, "remedy": "...",
     "evidence": {"step": 31, "group": 240, "member": 2}}
    {"event": "end", "run": "first", "out": "...", "text": "finished after step 100",
     "step": 100, "status": "finished"}            or interrupted, or failed, with its "reason"

A separate thread sends them in order. A slow or failed notification never delays or ends the run:
the first failure is reported, and later notifications are still sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.request import HTTPRedirectHandler, Request, build_opener

from actors.sglang.address import is_url
from cluster.run_files.background import WorkThread
from cluster.run_files.redact import redacted
from distill.errors import described
from distill.lookup import resolve_function

Receiver = Callable[[dict[str, Any]], object]
# Timeouts of one POST, and of the pending notifications at the run's end.
_POST_S, _END_S = 10.0, 15.0
_SETTING = "tracking.notify"
# Maximum number of messages that are queued for a slow receiver.
_WAITING = 1000


def receiver_of(notify: str | None) -> Receiver | None:
    """Create the receiver that `notify=` names; None if it is not set.

    Raises:
        ConfigError: `notify` is not a URL, and not a function that can be imported.
    """
    if notify is None:
        return None
    if is_url(notify):
        return lambda message: _post(notify, message)
    return resolve_function(_SETTING, notify, ())


def _post(url: str, message: dict[str, Any]) -> None:
    request = Request(
        url,
        json.dumps(message).encode(),
        {"Content-Type": "application/json", "User-Agent": "isotherm"},
    )
    with build_opener(_NoRedirect).open(request, timeout=_POST_S) as answer:
        answer.read(1)


class _NoRedirect(HTTPRedirectHandler):
    """Makes redirects an error, because notifications must not reach another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Notifier:
    """Sends notifications of a run to a receiver.

    Args:
        receiver: None disables notifications.
        print_line: prints a warning when a notification fails or is late.
        end_s: longest wait for pending notifications at the run's end.
    """

    def __init__(
        self,
        receiver: Receiver | None,
        out: Path,
        print_line: Callable[[str], None],
        end_s: float = _END_S,
    ) -> None:
        self._receiver, self._out, self._print_line, self._end_s = receiver, out, print_line, end_s
        self._failed = False
        self._thread = None if receiver is None else WorkThread("notify", self._fail, _WAITING)

    def send(self, event: str, *, text: str, **more: Any) -> None:
        """Queue a notification of an event."""
        message = {"event": event, "run": self._out.name, "out": str(self._out)}
        self._post({**message, **more, "text": text})

    def finish(self, summary: Mapping[str, Any], step: int) -> None:
        """Queue a notification of the run's end, and wait at most `end_s` for all of them."""
        status = str(summary.get("status", "failed"))
        reason = {"reason": redacted(str(summary["reason"]))} if "reason" in summary else {}
        text = f"{status} after step {step}" + (f": {reason['reason']}" if reason else "")
        self.send("end", text=text, step=step, status=status, **reason)
        if self._thread is not None and not self._thread.finish(self._end_s):
            self._warn_once(f"has not answered within {self._end_s:g} s of the run's end")

    def _post(self, message: dict[str, Any]) -> None:
        receiver = self._receiver
        if receiver is None or self._thread is None:
            return
        if not self._thread.add(lambda: receiver(message)):
            self._warn_once(f"is {_WAITING} messages behind, and will miss some")

    def _fail(self, error: BaseException) -> None:
        self._warn_once(f"failed ({error if isinstance(error, OSError) else described(error)})")

    def _warn_once(self, what: str) -> None:
        if not self._failed:
            self._failed = True
            self._print_line(
                f"WARNING: notify= {redacted(what)}; the run continues, and out/events.jsonl has "
                "all messages"
            )
