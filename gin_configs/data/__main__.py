"""Prepares data that recipes are shown with: LibreOffice's help pages, and Fashion-MNIST by a Debian package.

    python -m launcher.gin_configs.data help_en_de
    python -m launcher.gin_configs.data help_en_de --archives=/usr/share/libreoffice/help
    python -m launcher.gin_configs.data fashion_mnist

NAME is help_en_de, help_en_fr, help_en_es or fashion_mnist. Packages are fetched with apt-get and unpacked with dpkg,
without root. What is prepared already is left alone.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from launcher.data import prepare as program
from launcher.errors import UsageError, listed
from launcher.gin_configs.data import debian, help_pages


def prepare(name: str, *, archives: Path | None = None, say: Callable[[str], None] = print) -> None:
    """Prepares one of them; for arguments and errors, see the function of that name of either module."""
    if name in help_pages.NAMES:
        help_pages.prepare(name, archives=archives, say=say)
    elif name in debian.PACKAGES:
        debian.prepare(name, say=say)
    else:
        raise UsageError(f"{name!r} is none of {listed([*help_pages.NAMES, *debian.PACKAGES])}")


if __name__ == "__main__":
    sys.exit(program.main(make=prepare, about=__doc__ or ""))
