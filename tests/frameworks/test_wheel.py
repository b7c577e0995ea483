# SPDX-License-Identifier: Apache-2.0
"""README's `pip install .` compiles, which takes too long for the whole suite.

tests/e2e/test_install.py tests a wheel of a finished build."""

from __future__ import annotations

import pathlib
import sys

from installations import line_of_readme, run, show_torch, train_readme_s_example


def test_pip_install_compiles_a_wheel_that_runs_readme_s_example(own_store, tmp_path):
    made = run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    assert made.returncode == 0, made.stderr
    python = tmp_path / "venv" / "bin" / "python"
    installed = run(
        "bash", "-ec", f". {python.parent}/activate; {line_of_readme('pip install ')}", timeout_s=1800
    )
    assert installed.returncode == 0, installed.stdout + installed.stderr
    library = run(
        str(python), "-c", "from ropeteam import _native; print(_native.library().path)", cwd=tmp_path
    )
    assert pathlib.Path(library.stdout.strip()).is_relative_to(tmp_path / "venv"), library.stderr
    show_torch(python)
    train_readme_s_example(python, own_store, tmp_path)
