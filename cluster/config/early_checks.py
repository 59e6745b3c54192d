"""Checks of the files, models and functions that settings name, before torch is imported.

The metadata of a setting's field declares what the setting names: `model_field`, HEAD, WRITTEN,
WRITTEN_DIRECTORY, RUN, READ, `cluster.config.rows.ROWS`, `distill.settings.FUNCTION` and ADAPTER.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import chz

from actors.sglang.address import is_url
from cluster.config.checkpoint_facts import (
    check_length,
    check_readable,
    check_stop_tokens,
    check_vocabulary_files,
    check_weights,
)
from cluster.config.job_upload import refuse_upload
from cluster.config.rows import RowCheck
from cluster.config.run_record import saved_steps
from distill.chat.template_choice import template_text
from distill.data.row_files import located
from distill.data.row_reader import RowReader
from distill.data.sources import Kind, kind_of, parse_sources, require_source
from distill.errors import CheckpointError, ConfigError, DataError
from distill.gpu import no_gpu_here
from distill.lookup import path_meant, require_module
from distill.model_paths import check_model_path, trained_model
from distill.rules import ABSENT, get

# Deadline for the hub's first answer, seconds.
_ANSWER_S = 5.0
# teacher=policy: the teacher is the student itself, as it trains. For a directory of this name,
# write ./policy.
OWN = "policy"

# Metadata of fields that name a file or a directory to write, another run, or a model.
WRITTEN: Final[dict[str, Any]] = {"path": "written"}
WRITTEN_DIRECTORY: Final[dict[str, Any]] = {"path": "written directory"}
RUN: Final[dict[str, Any]] = {"path": "run"}
# A directory whose contents the command itself checks, such as a run that may still begin.
READ: Final[dict[str, Any]] = {"path": "read"}
_MODEL: Final[dict[str, Any]] = {"path": "model"}
# A checkpoint of which only a part of the weights is read.
HEAD: Final[dict[str, Any]] = {"path": "head"}


def model_field(*, metadata: Mapping[str, Any] | None = None, **field: Any) -> Any:
    """A chz field for a model's path. The directory of a run is replaced by its trained model."""
    return chz.field(munger=_trained, metadata={**_MODEL, **(metadata or {})}, **field)


def _trained(_config: Any, path: str | None) -> str | None:
    return path if path is None or path == OWN or is_url(path) else trained_model(path)


def check_path(name: str, kind: str, text: str) -> None:
    """Check that a path, or the path of each source of rows, is valid for the operating system.

    Args:
        kind: `path` in the metadata of the setting's field.

    Raises:
        ConfigError: the path is too long, has a NUL, is a URL, has a ~ or $NAME that no shell
            replaced, or its links form a loop.
    """
    if kind == "function" or (kind in ("model", "head") and is_url(text)):
        return
    for path in text.split(",") if kind == "rows" else [text]:
        if why := _no_path(path):
            shown = path if len(path) < _SHOWN else f"{path[:_SHOWN]}..."
            raise ConfigError(f"{name}={shown} is not a valid path: {why}")


def _no_path(text: str) -> str:
    """Reason why a text is not a valid path; empty if it is, also if there is no such file."""
    if _URL.match(text):  # as a path, it would be a local directory named s3:
        return "URLs are not supported; give a path on storage that all nodes share and mount"
    try:
        os.stat(text)
    except ValueError as error:
        return str(error)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return "it is too long"
        if error.errno == errno.ELOOP:
            return "its symbolic links form a loop; remove the link, or give another path"
        if _OF_A_SHELL.match(text):
            return "~ and $NAME are expanded only by a shell; write the full path"
    return ""


def check_early(config: Any, *, elsewhere: bool = False) -> None:
    """Check the paths that settings name, and the device.

    Args:
        elsewhere: models run on an existing cluster, whose GPUs are not known here.

    Raises:
        ConfigError, CheckpointError, DataError: with the field, the value and the remedy.
    """
    resumes = bool(saved_steps(Path(getattr(config, "out", None) or "")))
    for name, kind, value in _paths(config):
        if not value.strip():
            raise ConfigError(f"{name}= is empty; give a value, or leave it out")
        if kind in _CHECKS and not (resumes and kind in _OF_THE_START):
            _CHECKS[kind](name, value)
    _check_against_files(config)
    if (row_readers := getattr(config, "row_readers", None)) is not None:
        for name, (read, check_row) in row_readers().items():
            _check_small_files(name, get(config, name), read, check_row)
    if (reward_model := getattr(config, "reward_model", None)) is not None:
        own = config.env.own_reward_model is not None
        check_model("env.reward_model" if own else "reward.function", reward_model)
    if (template := get(config, "model.chat_template")) not in (None, ABSENT):
        template_text(template)
    if (env := getattr(config, "env", None)) is not None:
        env.check_here()
    if (check_keep_best := getattr(config, "check_keep_best", None)) is not None:
        check_keep_best()
    if not elsewhere and get(config, "cluster.device") == "cuda" and no_gpu_here():
        raise ConfigError(
            "cluster.device=cuda but this machine has no GPU; use device=cpu or add one"
        )


def _paths(config: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Setting, kind and value of every path in the settings, including nested ones."""
    for name, field in chz.chz_fields(type(config)).items():
        value = getattr(config, name)
        within = value if isinstance(value, Mapping) else {"": value}
        for key, each in within.items():
            if chz.is_chz(each):
                yield from _paths(each, f"{prefix}{name}.{key}." if key else f"{prefix}{name}.")
            elif each is not None and (kind := (field.metadata or {}).get("path")):
                yield f"{prefix}{name}", kind, each


def check_model(name: str, path: str, *, tokenizer: bool = True) -> None:
    """Raise CheckpointError if there is no model at `path`, a directory or a hub name."""
    if path == OWN or is_url(path):
        return
    try:
        check_model_path(path)
        directory = Path(path)
        if not directory.exists():
            return require_hub(path)
        check_readable(directory)
        check_weights(directory)
        if tokenizer:
            check_vocabulary_files(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}", field=name, value=path) from error


def require_hub(name: str) -> None:
    """Check that a model of the hub is cached here, or that the hub answers.

    Libraries that load the model would raise an error only after 35 s.

    Raises:
        CheckpointError: the model is not in this machine's cache, and the hub does not answer.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise CheckpointError(
            f"cannot read a model config from {name!r}: there is no such directory, and it is "
            f"not a valid name of a hub repository: {error}"
        ) from error
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    if silent := _hub_silent():
        raise CheckpointError(
            f"cannot read a model config from {name!r}: there is no such directory, this machine's "
            f"cache has no such model, and {silent}. Give a directory, or run `hf download {name}` "
            "where there is a network, with the HF_HOME of this machine"
        )


def require_hub_rows(place: str) -> None:
    """As `require_hub`, for a data set: OWNER/NAME[:SUBSET[:SPLIT]].

    Raises:
        DataError: the data set is not in this machine's cache, and the hub does not answer.
    """
    name = place.partition(":")[0]
    if not _data_set_cached(name) and (silent := _hub_silent()):
        raise DataError(
            f"cannot read {place!r}: there is no such file, this machine's cache has no such data "
            f"set, and {silent}. Give a file, or load the data set once where there is a network, "
            "with the HF_HOME of this machine"
        )


def _data_set_cached(name: str) -> bool:
    """True if `datasets` or `huggingface_hub` has cached at least a part of the data set."""
    from huggingface_hub import constants, file_download

    owner, _, own = name.partition("/")
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    fetched = Path(constants.HF_HUB_CACHE) / file_download.repo_folder_name(
        repo_id=name, repo_type="dataset"
    )
    # `datasets` converts a name to snake case.
    kept = {each.name.replace("_", "").lower() for each in prepared.glob(f"{owner}___*")}
    return fetched.is_dir() or f"{owner}{own}".replace("_", "").lower() in kept


def _hub_silent() -> str:
    """Reason why the hub does not answer; empty if it answers."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so the hub is not queried"
    try:
        get_session().head(constants.ENDPOINT, timeout=_ANSWER_S)
    except Exception as error:  # versions of huggingface_hub use HTTP libraries with other errors
        return f"the hub at {constants.ENDPOINT} cannot be reached ({error})"
    return ""


def _check_against_files(config: Any) -> None:
    """Check the settings that must fit the model, if it is a local directory."""
    directory = Path(str(get(config, "model.path")))
    if not (directory / "config.json").is_file():
        return
    samples = get(config, "train_from") in (None, ABSENT)
    for name, check in _FITTING.items():
        value = get(config, name)
        if value not in (None, ABSENT, "") and (samples or check is not check_length):
            check(directory, value)


def _check_rows(name: str, value: str) -> None:
    with located(name):
        for source in parse_sources(name, value):
            require_source(source.place)
            if kind_of(source.place) is Kind.HUB:
                require_hub_rows(source.place)
            elif kind_of(source.place) is Kind.FUNCTION:
                require_module(name, source.place, ())


def _check_small_files(name: str, value: str | None, read: RowReader, check_row: RowCheck) -> None:
    """Check the fields of all rows of small files."""
    for source in [] if value is None else parse_sources(name, value):
        place = source.place
        if kind_of(place) is not Kind.FILE or Path(place).stat().st_size > _SMALL_BYTES:
            continue
        for number, row in read(place):
            with located(f"{place}:{number}"):
                check_row(row)


def check_run(name: str, path: str) -> None:
    """Raise ConfigError if there is no run at `path`, which is RUN or RUN:STEP."""
    run = path if Path(path).exists() else path.rpartition(":")[0] or path
    if not (Path(run) / "config.json").is_file():
        raise ConfigError(
            f"{name}={path} is not a run: {Path(run) / 'config.json'} does not exist; give the "
            f"out= of a run{path_meant(run, '*/')}"
        )


def _check_adapter(name: str, path: str) -> None:
    if not (Path(path) / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{name}={path} is not an adapter: {Path(path) / 'adapter_config.json'} does not "
            f"exist; give a directory in which peft saved one{path_meant(path, '*/')}"
        )


def _check_function(name: str, value: str) -> None:
    if ":" in value and not is_url(value):
        require_module(name, value, ())


def _check_written(name: str, path: str) -> None:
    refuse_upload(name, path)
    parent = Path(path).absolute().parent
    why = ""
    if Path(path).is_dir():
        why = "it is a directory; give a file"
    elif not parent.is_dir():
        why = f"the directory {parent} does not exist; create it first"
    elif not os.access(Path(path) if Path(path).exists() else parent, os.W_OK):
        why = f"no permission; choose another {name}"
    if why:
        raise ConfigError(f"{name}={path} cannot be written: {why}")


_CHECKS: dict[str, Callable[[str, str], None]] = {
    "model": check_model,
    "head": partial(check_model, tokenizer=False),
    "rows": _check_rows,
    "written": _check_written,
    "written directory": refuse_upload,
    "run": check_run,
    "adapter": _check_adapter,
    "function": _check_function,
}
_FITTING: dict[str, Callable[[Path, Any], None]] = {
    "sampling.max_new_tokens": check_length,
    "model.stop_tokens": check_stop_tokens,
}
# Kinds of paths that a run reads only at its first start, not when it is resumed.
_OF_THE_START = ("run", "adapter")
# A home directory at the start of a path, or an environment variable anywhere in it.
_OF_A_SHELL = re.compile(r"~|.*\$\{?\w")
_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
# Number of characters that messages show of a long path.
_SHOWN = 80
# Files up to this size are read by the early checks, which takes less than 0.1 s.
_SMALL_BYTES = 4 << 20
