"""Stand-ins for Ray's errors, which actors in this process raise if Ray is not installed."""

from __future__ import annotations


class RayError(Exception):
    """Base class of the errors of actors' calls."""


class GetTimeoutError(RayError, TimeoutError):
    """Raised if a call was not answered in time."""


class ObjectLostError(RayError):
    """Raised if an object was lost with its node. Never raised in one process."""


class RayActorError(RayError):
    """Raised if the called actor has ended."""

    def __init__(self, *, error_msg: str) -> None:
        super().__init__(error_msg)


class RayTaskError(RayError):
    """Raised if a call raised an error, which is the `cause`."""

    def __init__(self, function_name: str, traceback_str: str, cause: Exception) -> None:
        super().__init__(function_name, traceback_str)
        self.cause = cause

    def __str__(self) -> str:
        return self.args[1].strip()

    def as_instanceof_cause(self) -> RayTaskError:
        """Return this error as an instance of both RayTaskError and the cause's class."""
        kind = type(self.cause)
        if issubclass(RayTaskError, kind):
            return self
        both = type(f"RayTaskError({kind.__name__})", (RayTaskError, kind), {})
        error = both.__new__(both)
        error.args = self.args
        vars(error).update(vars(self.cause), cause=self.cause)
        return error
