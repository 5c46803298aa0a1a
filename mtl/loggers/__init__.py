"""Loggers of Lightning that a resumed run continues."""

from importlib.util import find_spec

from mtl import compat
from mtl.checks import require

compat.prepare_imports()


def need(package: str) -> None:
    """Raise InputError unless ``package``, which the logger of this name needs, is installed."""
    installed = find_spec(package) is not None
    require(installed, f"logger={package} needs the package {package}: pip install -e '.[{package}]'")
