"""Settings and fixtures of all tests: one torch thread, Ray, pair of checkpoints and TMPDIR."""

import os

os.environ.update(
    RAY_AUTH_MODE="disabled", RAY_memory_monitor_refresh_ms="0", RAY_USAGE_STATS_ENABLED="0",
    HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false",
)  # fmt: skip

import getpass
import multiprocessing.util
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from hypothesis import HealthCheck, settings
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from cluster.placement.forked_workers import Parent, parent_of_workers
from cluster.placement.local_head import local_head
from distill.errors import ConfigError
from distill.sandbox.sandbox import require_sandbox
from distill.tokenizer import load_tokenizer
from tests.tiny import TinyPair, make_tiny_pair

# Contents of `hub_cache`.
CACHED_MODELS = ("a/b", "a/c", "Qwen/Qwen3-0.6B")
CACHED_DATA_SETS = ("a/rows", "openai/gsm8k")
_PARENT: pytest.StashKey[Parent | None] = pytest.StashKey()

torch.set_num_threads(1)
# Machines are shared: tests have no time limits, and every run tries the same examples.
settings.register_profile(
    "isotherm", deadline=None, derandomize=True, max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
settings.load_profile("isotherm")


def pytest_configure(config: pytest.Config) -> None:
    """Give this session and its child processes their own directory for temporary files.

    Other users may pass through it, as through /tmp. Ray's logs, pytest's directories and compiled
    kernels stay in the default directories. This is not done at import, because processes that
    tests start import this module too.
    """
    parent = os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    tempfile.tempdir = tempfile.mkdtemp(prefix="isotherm-tests-", dir=parent)
    os.chmod(tempfile.tempdir, 0o711)
    # Last: multiprocessing removes its own directory in it first.
    multiprocessing.util.Finalize(None, shutil.rmtree, (tempfile.tempdir, True), exitpriority=-1000)
    os.environ["TMPDIR"] = tempfile.tempdir
    os.environ.setdefault("RAY_TMPDIR", parent)
    kernels = os.path.join(parent, f"torchinductor_{getpass.getuser()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", kernels)
    config.stash[_PARENT] = parent = parent_of_workers()  # pytest-xdist's workers share it
    if parent is not None:
        # from modules imported there, which pytest's own filters do not reach
        warnings.filterwarnings("ignore", "builtin type .* has no __module__", DeprecationWarning)
        parent.start()


def pytest_unconfigure(config: pytest.Config) -> None:
    if (parent := config.stash[_PARENT]) is not None:
        parent.end()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Event loop for `async def test_...`."""
    return "asyncio"


@pytest.fixture
def hub_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hub cache for this test and its child processes, with model names but no weights."""
    cache = tmp_path_factory.mktemp("cache")
    for variable in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(variable, str(cache))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    for name in CACHED_MODELS:
        model = cache / repo_folder_name(repo_id=name, repo_type="model")
        for file, text in (("refs/main", "1"), ("snapshots/1/config.json", "{}")):
            (model / file).parent.mkdir(parents=True)
            (model / file).write_text(text)
    for name in CACHED_DATA_SETS:
        (cache / repo_folder_name(repo_id=name, repo_type="dataset")).mkdir()
    return cache


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_tiny_pair(tmp_path_factory.mktemp("tiny-pair"))


@pytest.fixture(scope="session")
def tokenizer(tiny_pair: TinyPair) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_pair.student)


@pytest.fixture(scope="session")
def sandbox() -> None:
    """Skip tests that run programs in the sandbox where it is not available."""
    try:
        require_sandbox()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    import ray  # after the parent of its workers has been forked

    from cluster.placement.connect import join_local

    with local_head(cpus=8) as head:
        join_local(head, "tests")
        yield
        ray.shutdown()
