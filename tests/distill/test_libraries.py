"""The error for a missing library names the feature and the package."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from distill.data.row_files import read_rows
from distill.errors import ConfigError
from distill.rewards.registry import load_reward
from distill.text.condense import load_condenser
from distill.tools.load import load_tools
from tests.distill.test_token_rewards import byte_tokenizer

BYTES = byte_tokenizer()


@pytest.mark.parametrize(
    ("module", "use", "named"),
    [
        ("math_verify", partial(load_reward, "math_equal"), ("reward=math_equal", "math-verify")),
        ("jsonschema", partial(load_reward, "json_schema"), ("reward=json_schema", "jsonschema")),
        ("simpleeval", partial(load_tools, "calculator"), ("tools=calculator", "simpleeval")),
        ("bm25s", partial(load_tools, "retrieval:."), ("retrieval:.", "bm25s")),
        ("bm25s", partial(load_condenser, "keywords", BYTES), ("condenser=keywords", "bm25s")),
        ("pyarrow", partial(read_rows, "rows.parquet"), ("rows.parquet", "pyarrow")),
    ],
)
def test_a_missing_library_is_named(
    module: str,
    use: Callable[[], Any],
    named: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "rows.parquet").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as raised:
        use()
    assert all(name in str(raised.value) for name in named)
