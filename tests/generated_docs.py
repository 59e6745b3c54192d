"""`python -m tests.generated_docs` (`make docs-generated`): write the pages made from the code.

`tests/test_docs.py` checks that the committed pages are current.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chz.field import Field

from actors.envs.judge_env import Judged
from cluster.config.env import BUILT_IN
from cluster.config.help import default_text, rules_text, type_text
from cluster.config.recipes import CONFIGS
from cluster.run_files.metric_table import METRICS
from distill.settings import (
    ESSENTIAL,
    MAY_CHANGE,
    Section,
    class_in,
    declarer_of,
    fields_of,
    flagged,
    short_names,
)

DOCS = Path(__file__).parents[1] / "docs"

_SETTINGS_HEAD = """\
# Settings

This page lists every setting of `python -m cluster.train`, by section and by the class that
declares it. It is generated from the code (`make docs-generated`). `--help all` of a recipe shows
the same texts. [commands.md](commands.md#settings-worth-knowing) has those that most runs change.

- The most important settings are in **bold**.
- An empty type is a class. An empty default means that the setting is unset; the last column says
  what happens then.
- "Allowed" has the rules of a single setting. Combinations that depend on the models, the machine
  or several settings are checked at the start of a run, and refused with the reason.
- A setting is named by its path (`learner.lr`), by its last name if no other ends in it (`lr`), or
  by section and last name joined by `_` (`checkpoint_every`). `data=`, `engine=`, `model=`,
  `reward=`, `teacher=` and `weights=` set the first setting of their section. Short names are
  {short}.
- †: a resumed run may change the setting, because no step's result depends on it.
- "Only:" names the recipes (or environments) that have the settings of a class. Where a setting has
  others, they are at its end.
"""


_METRICS_HEAD = """\
# Metrics

This page lists the metrics of `metrics.jsonl` (and of [trackers](tracking.md)), one object per
optimizer step and one per evaluation outside of a step. It is generated from the code
(`make docs-generated`). What to do about a curve:
[objectives.md](objectives.md#where-to-start-and-what-to-look-at).

Read first: `opd/reverse_kl` (it should fall), `reward/mean`, `train/logprob_gap` (0 up to rounding
on fresh weights), `train/entropy`, `staleness/mean`, `time/wait`.

`p_T` is the student and `q_T` the teacher at temperature T; r is the ratio of learner to server
probability. A version is a weight version. KLs are in nats per token. Words in capitals stand for
any text.
"""


@dataclass
class _Row:
    """Setting in the table of the class that declares it.

    Attributes:
        owners: recipes (or environments) that have it.
        defaults: recipes by their default.
    """

    name: str
    first: Field
    bold: bool
    may_change: bool
    owners: list[str] = field(default_factory=list)
    defaults: dict[str, list[str]] = field(default_factory=dict)


def settings_page() -> str:
    """Text of docs/settings.md."""
    environments = {env.__name__: env for env in (*BUILT_IN, Judged)}
    short = [f"`{name}` (`{path}`)" for name, path in short_names(CONFIGS["opd"]).items()]
    lines = [_SETTINGS_HEAD.replace("{short}", ", ".join(short))]
    tables = _tables(CONFIGS, "")
    for section in Section:
        lines += [f"## {section.value.capitalize()}\n"]
        for part, rows in tables.items():
            if getattr(part, "section", None) == section:
                lines += _table(part, rows, list(CONFIGS))
    lines += ["## Environments\n"]
    for part, rows in _tables(environments, "env.").items():
        lines += _table(part, rows, list(environments))
    return "\n".join(lines)


def metrics_page() -> str:
    """Text of docs/metrics.md."""
    lines = [_METRICS_HEAD]
    for title, metrics in METRICS.items():
        lines += [f"## {title}\n"]
        lines += _markdown_table(
            ("metric", "unit", "meaning"),
            ((f"`{m.name}`", m.unit, _marked_down(m.meaning)) for m in metrics),
        )
    return "\n".join(lines)


def _tables(kinds: Mapping[str, type], prefix: str) -> dict[type, list[_Row]]:
    """Rows of the settings of all `kinds`, by the class that declares them.

    A mapping of objects, such as `teachers`, is in the table of the objects' class.
    """
    found: dict[type, dict[tuple[str, str], _Row]] = {}
    for owner, kind in kinds.items():
        bold, may_change = flagged(kind, ESSENTIAL), flagged(kind, MAY_CHANGE)
        for name, each, part in _fields(kind):
            rows = found.setdefault(part, {})
            row = rows.setdefault(
                (name, each._doc), _Row(prefix + name, each, name in bold, name in may_change)
            )
            row.owners.append(owner)
            row.defaults.setdefault(default_text(each), []).append(owner)
    return {part: list(rows.values()) for part, rows in found.items()}


def _fields(kind: type) -> Iterator[tuple[str, Field, type]]:
    """Path and field of every setting of `kind`, and the class whose table has it."""
    for name, each in fields_of(kind).items():
        element = class_in(each)
        yield name, each, element or declarer_of(kind, name)
        if element is not None:
            for inner, field_within in fields_of(element).items():
                yield f"{name}.NAME.{inner}", field_within, element


def _table(part: type, rows: list[_Row], owners: list[str]) -> Iterator[str]:
    about = (part.__doc__ or "").strip().splitlines()[0]
    common = Counter(tuple(row.owners) for row in rows).most_common(1)[0][0]
    only = "" if common in (tuple(owners), (part.__name__,)) else f" Only: {', '.join(common)}."
    yield f"### {part.__name__}\n"
    yield f"{_marked_down(about)}{only} Declared in `{part.__module__}`.\n"
    yield from _markdown_table(
        ("setting", "type", "default", "allowed", "meaning"),
        (
            (
                f"**`{row.name}`**{_mark(row)}" if row.bold else f"`{row.name}`{_mark(row)}",
                _code(type_text(row.first)), _defaults(row), _marked_down(rules_text(row.first)),
                _marked_down(row.first._doc)
                + ("" if tuple(row.owners) == common else f" ({', '.join(row.owners)})"),
            )
            for row in rows
        ),
    )  # fmt: skip


def _mark(row: _Row) -> str:
    return " †" if row.may_change else ""


def _defaults(row: _Row) -> str:
    """Default of the first recipe, and different defaults with their recipes."""
    (first, _), *others = row.defaults.items()
    parts = [_default(first), *(f"{_default(t)} ({', '.join(who)})" for t, who in others)]
    return "; ".join(part for part in parts if part)


def _default(text: str) -> str:
    return text if text == "required" else _code(text.removeprefix("default "))


def _markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield re.sub(r" +", " ", f"| {' | '.join(row)} |")
    yield ""


def _code(text: str) -> str:
    return f"`{text}`".replace("|", r"\|") if text else ""


def _marked_down(text: str) -> str:
    """Text of the code as Markdown in a table: escaped, with links to pages of docs/."""
    parts = text.split("`")
    for i, part in enumerate(parts):
        if i % 2 == 0:
            part = re.sub(r"([\\*<])", r"\\\1", part)
            part = re.sub(r"\bdocs/([\w/-]+\.md)(#[\w-]+)?", r"[\1](\1\2)", part)
        parts[i] = part.replace("|", r"\|")
    return "`".join(parts)


PAGES: dict[str, Callable[[], str]] = {"settings.md": settings_page, "metrics.md": metrics_page}


def main() -> None:
    """Write all generated pages."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())


if __name__ == "__main__":
    main()
