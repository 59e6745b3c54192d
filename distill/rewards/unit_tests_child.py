"""Child of `unit_tests.py`, in the sandbox: runs the tests, and the solution in its own process.

    tests ── call of solve, with its arguments: 3 ────> solution
          <── result: 4, and the arguments afterwards ──

This script needs only the standard library, and runs in both processes. If the tests are cases of
standard input and output, the solution's process runs the solution as a script once per case.

Messages are lines of JSON. Numbers, text, lists, tuples, dicts, sets and the types of
`_CONSTRUCTED` are sent by value, as exactly those types. Any other object stays in its process, and
the other side uses it through requests (`Remote`). No code of the solution therefore runs in the
tests' process: no `__eq__` that is always true, no exit, no access to the tests. A remote object
never receives a plain value to compare itself with, to add or to search for, so it cannot return
the result that the tests expect. The tests serve calls of functions that they passed, and the
operations of `_served`.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import linecache
import operator
import os
import pkgutil
import subprocess
import sys
import tempfile
import traceback
import types
from collections import deque
from collections.abc import Callable
from typing import Any, BinaryIO

_PR_SET_DUMPABLE = 4
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "getattr": getattr,
    "setattr": setattr,
    "isinstance": lambda kind, value: isinstance(value, kind),  # pyright: ignore
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "bool": bool,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
}
# Operations that the tests' process executes for the solution.
_SERVED = ("getattr", "setattr", "len", "iter", "next", "bool", "getitem", "setitem", "eq", "lt")
# File name of the tests in tracebacks.
_TESTS = "tests.py"
# Number of characters kept from the end of a script's errors.
_TAIL_CHARS = 1000
# Modules that the solution may pass to the tests. Importing other modules may have any effect:
# `unittest.__main__` ends the process.
_MODULES = (
    *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools"),
    *("heapq", "itertools", "json", "math", "numpy", "operator", "random", "re", "statistics"),
    *("string", "typing"),
)
# Special attributes that a remote object has. It lacks all others, because the interpreter and
# libraries use them, such as `__array_interface__` of numpy.
_SPECIAL = ("__name__", "__qualname__")
# Names in the module of the tests that `unittest.main` calls.
_UNITTEST_HOOKS = ("load_tests", "setUpModule", "tearDownModule")
_STOPS = ("StopIteration", "StopAsyncIteration")
_SEQUENCES: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
# Types that are sent as the arguments of a function that creates an equal object.
_CONSTRUCTED: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]]]] = {
    "builtins.complex": ("builtins:complex", lambda v: (v.real, v.imag)),
    "builtins.range": ("builtins:range", lambda v: (v.start, v.stop, v.step)),
    "collections.Counter": ("collections:Counter", lambda v: (dict(v),)),
    "collections.OrderedDict": ("collections:OrderedDict", lambda v: (list(v.items()),)),
    "collections.deque": ("collections:deque", lambda v: (list(v), v.maxlen)),
    "datetime.date": ("datetime:date", lambda v: (v.year, v.month, v.day)),
    "datetime.datetime": ("datetime:datetime.fromisoformat", lambda v: (v.isoformat(),)),
    "datetime.time": ("datetime:time.fromisoformat", lambda v: (v.isoformat(),)),
    "datetime.timedelta": ("datetime:timedelta", lambda v: (v.days, v.seconds, v.microseconds)),
    "decimal.Decimal": ("decimal:Decimal", lambda v: (str(v),)),
    "fractions.Fraction": ("fractions:Fraction", lambda v: (v.numerator, v.denominator)),
    "numpy.ndarray": ("numpy:array", lambda v: (v.tolist(), v.dtype.str)),
}


class Peer:
    """One end of the connection. Both ends may send requests, also while they serve a request."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO, operations: dict[str, Callable]) -> None:
        self._reader = reader
        self._writer = writer
        self._operations = operations
        self._ours: list[Any] = []
        self._numbers: dict[int, int] = {}  # index in `_ours`, by the object's identity
        self._theirs: dict[int, Remote] = {}

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Request an operation of the other side, and return the result.

        Changes that the other side made to lists, dicts and sets in the arguments are repeated
        here.

        Raises:
            Exception: the other side raised an exception; the nearest built-in one is raised.
        """
        self._send([operation, self.encoded(arguments), self.encoded(named)])
        while True:
            kind, *rest = self._receive()
            if kind == "value":
                _refresh([*arguments, *named.values()], self.decoded(rest[1]))
                return self.decoded(rest[0])
            if kind == "raised":
                raise _built_in_error(rest[0], rest[1], stops=operation == "next")
            self._answer(kind, *rest)

    def serve(self) -> None:
        while True:
            self._answer(*self._receive())

    def _answer(self, operation: str, arguments: Any, named: Any) -> None:
        try:
            given, names = self.decoded(arguments), self.decoded(named)
            result = self.encoded(self._operations[operation](*given, **names))
            reply = ["value", result, self.encoded([*given, *names.values()])]
        except BaseException as error:  # of any kind: it is raised in the other process
            kinds = [kind.__name__ for kind in type(error).__mro__]
            reply = ["raised", kinds, str(error)]
        self._send(reply)

    def _send(self, message: list[Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        self._writer.flush()

    def _receive(self) -> list[Any]:
        line = self._reader.readline()
        if not line:
            raise EOFError("the solution's process has ended")
        return json.loads(line)

    def encoded(self, value: Any) -> Any:
        if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
            value = value.item()
        kind = f"{type(value).__module__}.{type(value).__name__}"
        if kind in _CONSTRUCTED:
            return [kind, [self.encoded(part) for part in _CONSTRUCTED[kind][1](value)]]
        # Instances of subclasses, such as named tuples, are sent as their base type.
        if value is None or isinstance(value, int | float | str):
            return value
        if isinstance(value, dict):
            return ["dict", [[self.encoded(k), self.encoded(v)] for k, v in value.items()]]
        if isinstance(value, list | tuple | set | frozenset):
            name = next(n for n, kind in _SEQUENCES.items() if isinstance(value, kind))
            return [name, [self.encoded(item) for item in value]]
        if isinstance(value, bytes | bytearray):
            return ["bytes", value.hex()]
        if isinstance(value, types.ModuleType) and value.__name__ in _MODULES:
            return ["module", value.__name__]
        if isinstance(value, Remote):
            return ["yours", object.__getattribute__(value, "_number")]
        number = self._numbers.setdefault(id(value), len(self._ours))
        if number == len(self._ours):
            self._ours.append(value)
        return ["mine", number]

    def decoded(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        kind, content = data
        if kind == "dict":
            return {self.decoded(key): self.decoded(value) for key, value in content}
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](self.decoded(item) for item in content)
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind in _CONSTRUCTED:
            make = pkgutil.resolve_name(_CONSTRUCTED[kind][0])
            return make(*(self.decoded(part) for part in content))
        if kind == "module" and content in _MODULES:
            return pkgutil.resolve_name(content)
        if kind == "yours":
            return self._ours[content]
        return self._theirs.setdefault(content, Remote(self, content))


class Remote:
    """An object of the other process. It equals no plain value, whatever its `__eq__` returns.

    It may be compared, added, subtracted and multiplied with another remote object, but not with
    plain values, in either order, and cannot be converted to one (`abs`, `round`, `float`, an
    index). Python tests whether it contains a value by iterating over its items.
    """

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _remote_call(self, "call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _SPECIAL:
            raise AttributeError(f"{name} of an object of the other side's")
        return _remote_call(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _remote_call(self, "setattr", name, value)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and _remote_call(self, "isinstance", instance) is True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and _remote_call(self, "eq", other) is True

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_number"))

    def __lt__(self, other: Any) -> Any:
        return _remote_binary(self, "lt", other)

    def __le__(self, other: Any) -> Any:
        return _remote_binary(self, "le", other)

    def __add__(self, other: Any) -> Any:
        return _remote_binary(self, "add", other)

    def __sub__(self, other: Any) -> Any:
        return _remote_binary(self, "sub", other)

    def __mul__(self, other: Any) -> Any:
        return _remote_binary(self, "mul", other)

    def __iter__(self) -> Any:
        return _remote_call(self, "iter")

    def __next__(self) -> Any:
        return _remote_call(self, "next")

    def __len__(self) -> int:
        return _remote_call(self, "len")

    def __bool__(self) -> bool:
        return _remote_call(self, "bool") is True

    def __str__(self) -> str:
        return str(_remote_call(self, "str"))

    def __getitem__(self, key: Any) -> Any:
        return _remote_call(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _remote_call(self, "setitem", key, value)

    # No `__contains__`: Python iterates over the items, and compares them in this process.


def _remote_call(remote: Remote, operation: str, *arguments: Any, **named: Any) -> Any:
    peer: Peer = object.__getattribute__(remote, "_peer")
    return peer.ask(operation, remote, *arguments, **named)


def _remote_binary(remote: Remote, operation: str, other: Any) -> Any:
    """Operation on two objects of the other process; NotImplemented for any other operand."""
    return _remote_call(remote, operation, other) if isinstance(other, Remote) else NotImplemented


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return function(*arguments, **named)


def _served(name: str) -> Callable[..., Any]:
    """An operation that the tests execute for the solution, on an object that they passed.

    The object must be an instance of a class of the tests, and attributes must be public; an
    iterator may be advanced. Other objects are refused: the frame of a generator would give access
    to the tests.
    """

    def serve(value: Any, *arguments: Any) -> Any:
        iterates = name in ("iter", "next") and hasattr(type(value), "__next__")
        private = "attr" in name and str(arguments[0]).startswith("_")
        if private or not (iterates or type(value).__module__ == "__main__"):
            raise TypeError(f"{type(value).__name__} of the tests: no {name} {arguments}")
        return _OPERATIONS[name](value, *arguments)

    return serve


def _refresh(before: list[Any], after: list[Any]) -> None:
    for old, new in zip(before, after, strict=True):
        kind = type(new).__name__
        if kind == "list" and isinstance(old, list):
            old[:] = new
        elif type(old) is type(new) and kind == "ndarray":
            old[...] = new
        elif any(isinstance(old, base) and isinstance(new, base) for base in (dict, set, deque)):
            old.clear()
            (old.extend if isinstance(old, deque) else old.update)(new)


def _built_in_error(kinds: list[str], text: str, *, stops: bool) -> Exception:
    """The nearest built-in exception. Never a SystemExit, which would end the tests with success.

    StopIteration is allowed only as the end of an iterator: raised by a function, it would end
    `map` and `zip` in the tests before they compare anything.
    """
    for name in kinds:
        kind = getattr(builtins, name, None)
        if name in _STOPS and not stops:
            continue
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:  # its constructor needs more than a text
                continue
    return RuntimeError(f"{kinds[0]}: {text}")


def run_tests() -> None:
    """Run the tests; the process ends with exit code 0 if and only if they pass."""
    # Otherwise the solution's process, of the same user, could write into this one's memory.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    sys.excepthook = _show
    given = json.loads(sys.stdin.buffer.read())
    plan = given["tests"]
    runner = types.ModuleType("runner")
    exec(compile(given["runner"], "runner.py", "exec"), runner.__dict__)
    if plan["scripts"]:
        runner.run(plan, {}, None, _script(given["solution"]))
        return
    peer = Peer(*_start("functions"), {"call": _call, **{name: _served(name) for name in _SERVED}})
    names = _safe(peer.ask("names", given["solution"]))
    solution = types.ModuleType("solution")
    solution.__dict__.update(names)
    tests = types.ModuleType("__main__")
    tests.__dict__.update(names)
    sys.modules.update(solution=solution, __main__=tests)
    sys.argv = ["tests"]
    linecache.cache[_TESTS] = (1, None, plan["source"].splitlines(True), _TESTS)
    exec(compile(plan["source"], _TESTS, "exec"), tests.__dict__)
    runner.run(plan, vars(tests), lambda: _entry(peer, tests, plan["entry"]), None)


def _entry(peer: Peer, tests: types.ModuleType, name: str | None) -> Any:
    """The function under test, by its name or an expression; by default the main function."""
    if name is None or name.isidentifier():
        return peer.ask("entry", name)
    return eval(name, tests.__dict__)


def _show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print the traceback of a failed test, without this script's own frames."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename == _TESTS]
    lines = traceback.format_list(frames) + traceback.format_exception_only(kind, error)
    sys.stderr.write("".join(lines))


def _safe(names: dict[str, Any]) -> dict[str, Any]:
    """Remove names of built-ins, of special attributes and of unittest's hooks.

    In tests, `all` must mean the built-in.
    """
    return {
        name: value
        for name, value in names.items()
        if not name.startswith("__") and not hasattr(builtins, name) and name not in _UNITTEST_HOOKS
    }


def _script(source: str) -> Callable[[str], Any]:
    """Function that runs the solution on a standard input; returns output, exit code, errors."""
    reader, writer = _start("scripts")

    def ask(text: str) -> Any:
        writer.write(json.dumps(text).encode() + b"\n")
        writer.flush()
        return json.loads(reader.readline() or "null")

    ask(source)
    return ask


def _start(kind: str) -> tuple[BinaryIO, BinaryIO]:
    """Start the solution's process; return files to read from it and to write to it."""
    their_reader, our_writer = os.pipe()
    our_reader, their_writer = os.pipe()
    ends = (their_reader, their_writer)
    subprocess.Popen(
        [sys.executable, "-I", "-B", "-X", "utf8", __file__, kind, *map(str, ends)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=ends,
    )
    for end in ends:
        os.close(end)
    return os.fdopen(our_reader, "rb"), os.fdopen(our_writer, "wb")


def run_solution(reader: int, writer: int) -> None:
    operations = {**_OPERATIONS, "call": _call, "names": _names, "entry": _main_function}
    Peer(os.fdopen(reader, "rb"), os.fdopen(writer, "wb"), operations).serve()


def run_scripts(reader: int, writer: int) -> str:
    """For each input, fork a process, and answer with what it printed.

    Returns only in the forked process, with the source to run, so that it ends as any script does.
    """
    requests, replies = os.fdopen(reader, "rb"), os.fdopen(writer, "wb")
    source, reply = json.loads(requests.readline()), None
    while True:
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
        line = requests.readline()
        if not line:
            os._exit(0)
        streams = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115 - the fork's too
        streams[0].write(json.loads(line).encode())
        streams[0].seek(0)
        script = os.fork()
        if script == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream.fileno(), number)
            return source
        code = os.waitstatus_to_exitcode(os.waitpid(script, 0)[1])
        texts = []
        for stream in streams[1:]:
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
            stream.close()
        reply = [texts[0], code, texts[1][-_TAIL_CHARS:]]


def _names(source: str) -> dict[str, Any]:
    """Execute the solution; return the names that it defines."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(source, "solution.py", "exec"), module.__dict__)
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


def _main_function(name: str | None) -> Callable[..., Any]:
    """The solution's function of that name, or a method of its class `Solution`.

    Without a name, it is the last function that no other function of the solution uses.
    """
    names = vars(sys.modules["solution"])
    if name in names:
        return names[name]
    owner = names["Solution"]() if "Solution" in names else None
    if name is not None:
        return getattr(owner, name)
    if owner is not None:
        names = {each: getattr(owner, each) for each in vars(type(owner)) if each[0] != "_"}
    functions = {
        each: value
        for each, value in names.items()
        if callable(value)
        and not isinstance(value, type)
        and getattr(value, "__module__", None) == "solution"
    }
    codes = {each: getattr(value, "__code__", None) for each, value in functions.items()}
    used = {
        word
        for each, code in codes.items()
        for word in (code.co_names if code else ())
        if word != each
    }
    return functions[([each for each in functions if each not in used] or list(functions))[-1]]


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    if len(sys.argv) == 1:
        run_tests()
    elif sys.argv[1] == "functions":
        run_solution(*map(int, sys.argv[2:]))
    else:
        program = compile(run_scripts(*map(int, sys.argv[2:])), "solution.py", "exec")
        sys.argv = ["solution.py"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(program, sys.modules["__main__"].__dict__)
