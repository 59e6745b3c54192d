"""Dependency rules, isotherm -> cluster -> {actors, learner} -> distill, over every import."""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NETWORK = {"requests", "httpx", "aiohttp", "socket", "urllib", "urllib3", "http", "huggingface_hub"}
FORBIDDEN = {
    "distill": {"ray", "sglang", "actors", "learner", "cluster", "isotherm", *NETWORK},
    "actors": {"ray", "learner", "cluster", "isotherm"},
    "learner": {"ray", "actors", "cluster", "isotherm"},
    "cluster": {"isotherm"},
    "isotherm": set(),
}
# Extras, slow to import, or needed by few features: imported inside the functions that need them.
# So a local run needs nothing but chz and pyarrow beside what torch, transformers and peft bring.
LAZY_ONLY = {
    "ray", "sglang", "datasets", "pyarrow", "pandas", "aiohttp", "bm25s", "jsonschema",
    "jsonschema_specifications", "math_verify", "orjson", "referencing", "semantic_text_splitter",
    "simpleeval",
}  # fmt: skip
# Files that import some of these at once, and are themselves imported inside functions.
EXEMPT = {
    "actors/envs/agent_endpoint.py": {"aiohttp"},
    "actors/sglang/client.py": {"aiohttp", "orjson"},
    "cluster/inspect/report/serve.py": {"aiohttp"},
    "cluster/placement/connect.py": {"ray"},
    "cluster/placement/placement_groups.py": {"ray"},
    "cluster/placement/prefetch.py": {"ray"},
    "cluster/placement/shared_storage.py": {"ray"},
    "cluster/rehearsal/strikes.py": {"ray"},
    "distill/process_groups.py": {"socket"},  # asks the kernel for a route, and sends nothing
    "distill/json_schemas.py": {"jsonschema", "jsonschema_specifications", "referencing"},
    "distill/tools/calculator.py": {"simpleeval"},
}
UNKNOWN = "a name worked out at run time"
# Bottom to top: a folder, or a file beside the folders, imports from itself and from those
# before it. `learner` is one folder.
ORDER = {
    "distill": [
        "errors", "durable_files", "json_values", "lookup", "rules", "settings", "sampling",
        "privileged", "routing", "types",
        "states",
        "columns", "records", "stops", "group_share",
        "model_paths",
        "libraries",
        "json_schemas", "tokenizer", "gpu", "main_memory", "weights", "engine",
        "weight_group", "sandbox", "chat",
        "text", "models", "objective", "data", "rewards", "tools", "envs", "envs/games",
        "handshake",
    ],
    "actors": [
        "hub", "together", "embedded", "sglang/plugin", "sglang", "rollout", "envs", "config",
    ],
    "cluster": [
        "process_memory", "base", "jsonl_log", "console", "handles", "config", "store", "queue",
        "run_files", "findings", "placement", "supervision", "handshake", "weights", "hosts",
        "runtime",
        "recipes", "run", "command", "inspect/report", "inspect/forecast", "inspect", "rehearsal",
        "demos", "train", "evaluate", "calibrate", "cli", "report", "forecast", "audit",
        "rollouts_to_sft", "replay", "sample_to_sft", "demo",
    ],
    "isotherm": ["shadowing", "losses", "sampler", "policy", "runs", "__main__"],
}  # fmt: skip


@cache
def imports(source: str) -> list[tuple[str, bool]]:
    """(top-level package, whether importing the module imports it) of every import in `source`.

    Imports under `if TYPE_CHECKING:` do not count.
    """
    found: list[tuple[str, bool]] = []
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(source), True)]
    while nodes:
        node, at_once = nodes.pop()
        at_once = at_once and not (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        )
        nodes += [(inner, at_once) for inner in ast.iter_child_nodes(node)]
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and _is_import_call(node.func):
            names = [_literal(node.args)]
        found += [(name.split(".")[0], at_once) for name in names]
    return found


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def _literal(arguments: list[ast.expr]) -> str:
    first = arguments[0] if arguments else None
    return str(first.value) if isinstance(first, ast.Constant) else UNKNOWN


def violations(package: str, source: str) -> set[str]:
    found = {name for name, _ in imports(source) if name in FORBIDDEN[package] | {UNKNOWN}}
    return found | {name for name, at_once in imports(source) if at_once and name in LAZY_ONLY}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", ["distill", "actors", "learner"])
def test_packages_import_only_packages_below_them(package: str) -> None:
    assert sources(package)
    for path in sources(package):
        exempt = EXEMPT.get(path.relative_to(ROOT).as_posix(), set())
        assert violations(package, path.read_text()) == exempt, path


def test_nothing_but_its_users_imports_the_library() -> None:
    for path in sources("cluster"):
        assert not FORBIDDEN["cluster"] & {name for name, _ in imports(path.read_text())}, path


@pytest.mark.parametrize("package", ["cluster", "isotherm"])
def test_ray_and_other_libraries_are_imported_lazily(package: str) -> None:
    for path in sources(package):
        at_once = {name for name, now in imports(path.read_text()) if now}
        exempt = EXEMPT.get(path.relative_to(ROOT).as_posix(), set())
        assert at_once & LAZY_ONLY == exempt, path


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def files_imported(package: str) -> dict[str, set[str]]:
    """Imports between files of a package, by module."""
    paths = [path for path in sources(package) if "cpu_standins" not in path.parts]
    modules = {module_of(path): path for path in paths}
    found: dict[str, set[str]] = {}
    for module, path in modules.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {name if name in modules else node.module for name in inner}
        found[module] = {name for name in named if name in modules} - {module, package}
    return found


def rank(module: str) -> int:
    """Position in `ORDER` of a module's folder, or of the module itself if it is in no folder."""
    package, *parts = module.split(".")
    if not parts:  # the package's own imports are its interface
        return len(ORDER[package])
    for end in range(len(parts), 0, -1):
        entry = "/".join(parts[:end])
        if entry in ORDER[package]:
            return ORDER[package].index(entry)
    raise AssertionError(f"{module} is in no folder of ORDER: give it its place there")


@pytest.mark.parametrize("package", list(ORDER))
def test_no_folder_imports_from_one_above_it(package: str) -> None:
    for module, imported in files_imported(package).items():
        above = {name for name in imported if rank(name) > rank(module)}
        assert not above, f"{module} imports {sorted(above)}, which are above it"


@pytest.mark.parametrize("package", list(ORDER))
def test_every_entry_of_the_order_exists(package: str) -> None:
    for entry in ORDER[package]:
        path = ROOT / package / entry
        assert path.is_dir() or path.with_suffix(".py").is_file(), entry


def cycles(imported: Mapping[str, set[str]]) -> list[set[str]]:
    """Sets of files that import each other, directly or indirectly."""
    reached: dict[str, set[str]] = {}
    for module in imported:
        seen, ahead = set[str](), [module]
        while ahead:
            new = imported[ahead.pop()] - seen
            seen |= new
            ahead += new
        reached[module] = seen
    found = []
    for module in imported:
        ring = {other for other in reached[module] if module in reached[other]}
        if ring and ring not in found:
            found.append(ring)
    return found


@pytest.mark.parametrize("package", list(FORBIDDEN))
def test_no_files_import_each_other(package: str) -> None:
    assert cycles(files_imported(package)) == []


def test_the_search_for_cycles_finds_them() -> None:
    imported = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}
    assert cycles(imported) == [{"b", "c"}, {"e"}]


# Modules in which a process begins that moves no tensors: entry points, and actors.
WITHOUT_TORCH = (
    "actors.rollout.evaluator",
    "actors.sglang.nodes",
    "actors.sglang.start",
    "cluster.calibrate",
    "cluster.cli",
    "cluster.demo",
    "cluster.evaluate",
    "cluster.forecast",
    "cluster.hosts.actors",
    "cluster.hosts.evaluator_actor",
    "cluster.hosts.rollout_actor",
    "cluster.inspect.audit",
    "cluster.inspect.doctor",
    "cluster.inspect.report.command",
    "cluster.queue.queue_actor",
    "cluster.replay",
    "cluster.rollouts_to_sft",
    "cluster.sample_to_sft",
    "cluster.train",
    "distill.envs.single_turn",
    "examples.opd_vs_rl.__main__",
    "examples.show.__main__",
)
NOWHERE = "/nowhere/at/all"
ROWS = "prompts=a/rows"
# Answered before slow imports: help, typos, and missing paths.
ANSWERED_AT_ONCE = (
    ("train", "recipe=opd --help", 0),
    ("train", "recipe=sft stpes=3", 2),
    ("evaluate", "--help", 0),
    ("calibrate", "--help", 0),
    ("report", "--help", 0),
    ("train", f"recipe=opd student={NOWHERE} teacher=a/b {ROWS} temperature=1 out=OUT", 2),
    ("train", f"recipe=opd student=a/b teacher={NOWHERE} {ROWS} temperature=1 out=OUT", 2),
    ("train", "recipe=opd student=a/b teacher=a/c prompts=no.jsonl temperature=1 out=OUT", 2),
    ("train", f"recipe=rl student=a/b reward=model:{NOWHERE} {ROWS} temperature=1 out=OUT", 2),
    ("train", f"recipe=opd student=a/b teacher=a/c {ROWS} temperature=1 out=OUT loss=no_such:f", 2),
    ("train", f"recipe=rl student=a/b {ROWS} temperature=1 out=OUT env=ToolUse env.tools=calc", 2),
    ("train", f"recipe=rl student=a/b {ROWS} temperature=1 out=OUT env=Agent env.command=no", 2),
    ("train", f"recipe=sft model={NOWHERE} data=a/rows out=OUT", 2),
    ("train", f"recipe=sft model=a/b data=a/rows chat_template={NOWHERE} out=OUT", 2),
    ("train", "recipe=sft model=a/b data=a/rows out=README.md", 2),
    ("train", "recipe=sft model=a/b data=a/rows out=tests", 2),
    ("evaluate", f"model={NOWHERE} {ROWS}", 2),
    ("evaluate", f"model=a/b {ROWS} out={NOWHERE}", 2),
    ("forecast", f"student={NOWHERE} teacher=a/b {ROWS} temperature=1", 2),
    ("calibrate", f"student=a/b teacher={NOWHERE} temperature=1", 2),
    ("sample_to_sft", f"model={NOWHERE} {ROWS} data=OUT.jsonl", 2),
)
_TRY = """
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
print(*sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
_ANSWER = """
import importlib, sys
for name, arguments, code in {answered}:
    main = importlib.import_module(f"cluster.{{name}}").main
    assert main(arguments.split()) == code, arguments
    loaded = {{"torch", "transformers", "ray", "aiohttp", "datasets", "pyarrow"}} & set(sys.modules)
    assert not loaded, (name, arguments, loaded)
"""

# Runs that start Ray themselves, up to that point.
STARTING_RAY = (
    f"recipe=opd student=a/b teacher=a/c {ROWS} temperature=0.7 out=OUT eval.every=1",
    f"recipe=opd student=a/b teacher=a/c {ROWS} temperature=0.7 out=OUT engine=embedded",
    f"recipe=rl student=a/b {ROWS} temperature=1 out=OUT reward=exact_match",
    "recipe=sft model=a/b data=a/rows out=OUT",
)
_START = """
import sys
import cluster.train
def start(cpus):
    sys.exit(7 if not {{"torch", "transformers", "ray"}} & set(sys.modules) else "too late")
cluster.train.local_head = start
for arguments in {started}:
    try:
        cluster.train.main(arguments.split())
    except SystemExit as ended:
        assert ended.code == 7, (arguments, ended.code)
    else:
        raise AssertionError(f"no Ray for {{arguments}}")
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run the code in a separate process from the project's directory, without a Ray to join."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_processes_without_tensors_start_without_torch() -> None:
    """Importing torch dominates the start-up time and memory of these processes."""
    found = python(_TRY.format(modules=WITHOUT_TORCH))
    assert (found.returncode, found.stdout.strip()) == (0, ""), found.stderr


@pytest.mark.usefixtures("hub_cache")
def test_help_and_typos_are_answered_without_slow_imports(tmp_path: Path) -> None:
    answered = [
        (name, arguments.replace("OUT", str(tmp_path / "out")), code)
        for name, arguments, code in ANSWERED_AT_ONCE
    ]
    ended = python(_ANSWER.format(answered=answered))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.usefixtures("hub_cache")
def test_ray_comes_up_beside_the_imports_of_torch(tmp_path: Path) -> None:
    started = [arguments.replace("OUT", str(tmp_path / "out")) for arguments in STARTING_RAY]
    ended = python(_START.format(started=started))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("package", "source", "found"),
    [
        ("distill", "import ray", {"ray"}),
        ("distill", "import ray.util.queue as q", {"ray"}),
        ("distill", "from cluster.queue.group_queue import GroupQueue", {"cluster"}),
        ("distill", "def f():\n    import socket", {"socket"}),
        ("distill", "async def f():\n    from urllib.request import urlopen", {"urllib"}),
        ("distill", "if TYPE_CHECKING:\n    import learner.loop", {"learner"}),
        ("distill", "import importlib\nimportlib.import_module('ray')", {"ray"}),
        ("distill", "from importlib import import_module\nimport_module('ray.util')", {"ray"}),
        ("distill", "__import__('http.client')", {"http"}),
        ("distill", "import importlib\nimportlib.import_module(name)", {UNKNOWN}),
        ("actors", "from learner.loop import PolicyLoop", {"learner"}),
        ("learner", "class A:\n    import actors", {"actors"}),
        ("actors", "try:\n    import sglang\nexcept ImportError:\n    pass", {"sglang"}),
        ("actors", "class A:\n    import sglang", {"sglang"}),
        ("actors", "def f():\n    import sglang", set()),
        ("actors", "if TYPE_CHECKING:\n    import orjson", set()),
        ("distill", "import rayon, torch\nfrom . import kl", set()),
        ("distill", "'import ray'  # import ray", set()),
    ],
)
def test_the_search_finds_imports_of_every_form(package: str, source: str, found: set[str]) -> None:
    assert violations(package, source) == found


@pytest.mark.parametrize("package", list(FORBIDDEN))
def test_every_package_has_a_docstring(package: str) -> None:
    for directory in {path.parent for path in sources(package)}:
        init = directory / "__init__.py"
        assert init.is_file() and ast.get_docstring(ast.parse(init.read_text())), directory
