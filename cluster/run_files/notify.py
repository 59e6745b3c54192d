"""Notifications: findings and the run's end, to a URL or to a function of the user's.

    {"event": "finding", "run": "first", "out": "/.../runs/first", "text": "step 40: the ...",
     "name": "kl_rises", "step": 40, "remedy": "...",
     "evidence": {"step": 31, "group": 240, "member": 2}}
    {"event": "end", "run": "first", "out": "...", "text": "finished after step 100",
     "step": 100, "status": "finished"}            or interrupted, or failed, with its "reason"

They are told by a thread of their own, in order. What takes long or fails never holds up or ends
the run: it is named once, and the rest is tried all the same.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from distill.errors import ConfigError, described
from distill.lookup import resolve_function

Receiver = Callable[[dict[str, Any]], object]
# Of one POST, and what the run's end waits for those that are still to be told.
_POST_S, _END_S = 10.0, 15.0


def receiver_of(notify: str | None) -> Receiver | None:
    """What `notify=` names, or None.

    Raises:
        ConfigError: neither a URL with a host nor a function that can be imported.
    """
    if notify is None:
        return None
    url = urlsplit(notify)
    if url.scheme in ("http", "https"):
        if url.username or url.password:  # before the address is printed anywhere
            raise ConfigError(
                "notify= holds a user or a password, which would stand in config.json; give "
                "package.module:function, which may take them from the environment"
            )
        if not url.hostname:
            raise ConfigError(f"notify={notify} names no host; give https://HOST/PATH")
        return lambda told: _post(notify, told)
    if ":" not in notify:
        raise ConfigError(
            f"notify={notify} is neither a URL (https://...) nor package.module:function"
        )
    return resolve_function("notify", notify, ())


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings for others to see: of a URL in `notify=` its host alone, for the path of a
    chat's web hook is its key."""
    url = urlsplit(str(settings.get("notify")))
    if url.scheme not in ("http", "https"):
        return dict(settings)
    return {**settings, "notify": f"{url.scheme}://{url.netloc}/..."}


def _post(url: str, told: dict[str, Any]) -> None:
    request = Request(
        url,
        json.dumps(told).encode(),
        {"Content-Type": "application/json", "User-Agent": "isotherm"},
    )
    with urlopen(request, timeout=_POST_S) as answer:
        answer.read(1)


class Notifier:
    """Tells a receiver of a run.

    Args:
        receiver: None: nobody is told.
        say: is told of one that fails, or is late.
    """

    def __init__(
        self,
        receiver: Receiver | None,
        out: Path,
        say: Callable[[str], None],
        end_s: float = _END_S,
    ) -> None:
        self._receiver, self._out, self._say, self._end_s = receiver, out, say, end_s
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._failed = False
        self._thread: threading.Thread | None = None
        if receiver is not None:
            self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
            self._thread.start()

    def tell(self, event: str, *, text: str, **more: Any) -> None:
        """Tells of an event, some time soon."""
        told = {"event": event, "run": self._out.name, "out": str(self._out)}
        self._queue.put({**told, **more, "text": text})

    def finish(self, summary: Mapping[str, Any], step: int) -> None:
        """Tells of the run's end, and waits a little for all that is still to be told."""
        status = str(summary.get("status", "failed"))
        reason = {"reason": str(summary["reason"])} if "reason" in summary else {}
        text = f"{status} after step {step}" + (f": {reason['reason']}" if reason else "")
        self.tell("end", text=text, step=step, status=status, **reason)
        self._queue.put(None)
        if self._thread is None:
            return
        self._thread.join(self._end_s)
        if self._thread.is_alive():
            self._complain(f"has not answered within {self._end_s:g} s of the run's end")

    def _work(self) -> None:
        while (told := self._queue.get()) is not None:
            try:
                assert self._receiver is not None
                self._receiver(told)
            except (URLError, OSError) as error:
                self._complain(f"failed ({error})")
            except BaseException as error:  # the user's function may raise anything, an exit too
                self._complain(f"failed ({described(error)})")

    def _complain(self, what: str) -> None:
        if not self._failed:
            self._failed = True
            self._say(f"WARNING: notify= {what}; the run goes on, and out/events.jsonl has it all")
