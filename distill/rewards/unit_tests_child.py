"""Child of `unit_tests.py`, in the sandbox: runs the tests, and the solution in its own process.

    tests ── call solve(3), here are its arguments ──> solution
          <──── 4, and the arguments afterwards ──────

A script of the standard library alone, run for either side. Where the tests are cases of standard
input and output, the solution's process runs it as a script once for each. What crosses is JSON, a
line at a time: numbers, text, lists, tuples, dicts, sets and the types of `_CONSTRUCTED` by value,
as exactly those types; anything else stays where it is and is asked from afar (`Remote`). So
nothing of the solution's runs among the tests: no `__eq__` that is always true, no exit, no look at
the tests. An object that is asked from afar is never told a plain value to compare itself with, to
add or to look for, so it cannot say what the tests would like to hear. The tests serve calls of
functions that they passed, and the operations of `_served`.
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
# Those that the tests do for the solution.
_SERVED = ("getattr", "setattr", "len", "iter", "next", "bool", "getitem", "setitem", "eq", "lt")
# The name that tracebacks have for the tests.
_TESTS = "tests.py"
# Characters of what a script that failed said at its end.
_LAST_WORDS = 1000
# What the solution may have imported for the tests. Importing others may do anything, and
# `unittest.__main__` ends the process.
_MODULES = (
    *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools"),
    *("heapq", "itertools", "json", "math", "numpy", "operator", "random", "re", "statistics"),
    *("string", "typing"),
)
# Attributes with such names have a meaning to the interpreter and to libraries, numpy's
# `__array_interface__` for one; of an object that is asked from afar, these are there.
_SPECIAL = ("__name__", "__qualname__")
# What `unittest.main` looks for in the module of the tests, and obeys.
_UNITTEST_HOOKS = ("load_tests", "setUpModule", "tearDownModule")
_STOPS = ("StopIteration", "StopAsyncIteration")
_SEQUENCES: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
# Types that cross as the arguments of a function that makes an equal object.
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
    """One end. Both may ask, one inside of the other's request."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO, operations: dict[str, Callable]) -> None:
        self._reader = reader
        self._writer = writer
        self._operations = operations
        self._ours: list[Any] = []
        self._numbers: dict[int, int] = {}  # of `_ours`, by identity
        self._theirs: dict[int, Remote] = {}

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """The other's answer; changes that it made to lists, dicts and sets are made here too.

        Raises:
            Exception: what it raised, as the nearest built-in exception.
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
        except BaseException as error:  # the other side asked for it, whatever it is
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
        # Subclasses, such as named tuples, go as what they are at heart.
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
    """An object of the other side's. It equals no plain value, whatever it says itself.

    With another such object it may be compared, added, subtracted and multiplied; with plain values
    it may not, in either order, and is none itself (`abs`, `round`, `float`, an index). Whether it
    contains one is found by going through its items.
    """

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _far(self, "call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _SPECIAL:
            raise AttributeError(f"{name} of an object of the other side's")
        return _far(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _far(self, "setattr", name, value)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and _far(self, "isinstance", instance) is True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and _far(self, "eq", other) is True

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_number"))

    def __lt__(self, other: Any) -> Any:
        return _far_with(self, "lt", other)

    def __le__(self, other: Any) -> Any:
        return _far_with(self, "le", other)

    def __add__(self, other: Any) -> Any:
        return _far_with(self, "add", other)

    def __sub__(self, other: Any) -> Any:
        return _far_with(self, "sub", other)

    def __mul__(self, other: Any) -> Any:
        return _far_with(self, "mul", other)

    def __iter__(self) -> Any:
        return _far(self, "iter")

    def __next__(self) -> Any:
        return _far(self, "next")

    def __len__(self) -> int:
        return _far(self, "len")

    def __bool__(self) -> bool:
        return _far(self, "bool") is True

    def __str__(self) -> str:
        return str(_far(self, "str"))

    def __getitem__(self, key: Any) -> Any:
        return _far(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _far(self, "setitem", key, value)

    # No `__contains__`: Python goes through the items, and compares them here.


def _far(remote: Remote, operation: str, *arguments: Any, **named: Any) -> Any:
    peer: Peer = object.__getattribute__(remote, "_peer")
    return peer.ask(operation, remote, *arguments, **named)


def _far_with(remote: Remote, operation: str, other: Any) -> Any:
    """An operation on two objects of the other side's; with anything else there is none."""
    return _far(remote, operation, other) if isinstance(other, Remote) else NotImplemented


def _call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return function(*arguments, **named)


def _served(name: str) -> Callable[..., Any]:
    """An operation that the tests do for the solution, on what they passed to it.

    On an instance of a class of the tests, and on its public attributes; an iterator may be
    advanced. Nothing else: a generator's frame would lead to the tests themselves.
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
    """The built-in error of that kind. Never an exit, which would end the tests with success.

    Nor a StopIteration, except as the end of an iterator: raised by a function it would end `map`
    and `zip` of the tests before they compare anything.
    """
    for name in kinds:
        kind = getattr(builtins, name, None)
        if name in _STOPS and not stops:
            continue
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:  # it wants more than a text
                continue
    return RuntimeError(f"{kinds[0]}: {text}")


def run_tests() -> None:
    """Ends with exit code 0 if, and only if, the tests end well."""
    # Who is of the same user could else write into our memory.
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
    """The function under test: by its name or an expression, or the program's main function."""
    if name is None or name.isidentifier():
        return peer.ask("entry", name)
    return eval(name, tests.__dict__)


def _show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Prints the test that failed, without this script's own frames."""
    frames = [frame for frame in traceback.extract_tb(trace) if frame.filename == _TESTS]
    lines = traceback.format_list(frames) + traceback.format_exception_only(kind, error)
    sys.stderr.write("".join(lines))


def _safe(names: dict[str, Any]) -> dict[str, Any]:
    """The names, without those that Python has, or obeys: tests mean `all` as it is."""
    return {
        name: value
        for name, value in names.items()
        if not name.startswith("__") and not hasattr(builtins, name) and name not in _UNITTEST_HOOKS
    }


def _script(source: str) -> Callable[[str], Any]:
    """Runs the solution with a standard input: its output, exit code and errors."""
    reader, writer = _start("scripts")

    def ask(text: str) -> Any:
        writer.write(json.dumps(text).encode() + b"\n")
        writer.flush()
        return json.loads(reader.readline() or "null")

    ask(source)
    return ask


def _start(kind: str) -> tuple[BinaryIO, BinaryIO]:
    """Starts the solution's process; where to read from it, and to write to it."""
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
    """Forks for every input that comes, and answers with what the fork printed.

    Returns in the fork, with the source that it is to run: it ends as any script does.
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
        reply = [texts[0], code, texts[1][-_LAST_WORDS:]]


def _names(source: str) -> dict[str, Any]:
    """Names that the solution defines."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(source, "solution.py", "exec"), module.__dict__)
    return {name: value for name, value in vars(module).items() if not name.startswith("__")}


def _main_function(name: str | None) -> Callable[..., Any]:
    """The solution's function of that name, or a method of its class `Solution`.

    Without a name, it is the last function that no other one of the solution uses.
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
