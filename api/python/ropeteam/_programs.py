# SPDX-License-Identifier: Apache-2.0
"""The commands of an installed wheel: each executes the program in the package."""

from __future__ import annotations

import os
import pathlib
import sys
from typing import NoReturn


def ropeteam() -> NoReturn:
    _become("ropeteam")


def ropeteamd() -> NoReturn:
    _become("ropeteamd")


def _become(name: str) -> NoReturn:
    program = pathlib.Path(__file__).with_name("bin") / name
    try:
        # `ropeteam` finds ropeteamd and the library by its own path. exec keeps the process id.
        os.execv(program, [name, *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"{name}: cannot run {program}: {error.strerror}")
