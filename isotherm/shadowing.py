"""Detection of other packages with the names of ours: `cluster` and `actors` are common names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("distill", "actors", "learner", "cluster")
# The directory that contains this package: site-packages, a wheel, or a checkout.
_HOME = Path(__file__).resolve().parents[1]


def check_packages() -> None:
    """Check that Python would import isotherm's own packages. They are not imported.

    Raises:
        ImportError: a package is missing, or another package of its name would be imported.
    """
    for name in PACKAGES:
        found, ours = _place(name), _HOME / name
        if found is None or not (ours / "py.typed").is_file():
            raise ImportError(
                f"isotherm's package {name!r} is missing: it should be at {ours}. Install isotherm "
                "again (pip install --force-reinstall --no-deps isotherm), in an environment "
                f"without another distribution called {name}"
            )
        if found != ours:
            raise ImportError(
                f"{found} hides isotherm's package {name!r}, which is at {ours}. "
                f"{_remedy(found, name)}"
            )


def _place(name: str) -> Path | None:
    """Directory of the package, or file of the module, that `import` would load."""
    try:
        spec = find_spec(name)
    except ValueError:  # a module without a spec is in sys.modules, so other code created it
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or [spec.origin])
    return Path(str(places[0])).resolve()


def _remedy(found: Path, name: str) -> str:
    if "site-packages" in found.parts:
        return (
            f"It belongs to another distribution: pip uninstall {name}, or install isotherm in a "
            "separate environment"
        )
    if (found.parent / "isotherm" / "__init__.py").is_file():
        return (
            f"{found.parent} is another checkout of isotherm: pip install -e {found.parent}, or "
            "run its commands as python -m cluster.train"
        )
    return f"Rename it, or start Python in another directory than {found.parent}"
