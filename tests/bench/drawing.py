# SPDX-License-Identifier: Apache-2.0
"""Rows of ropeteam-bench, drawn by a script of scripts/plot-*."""

import pathlib
import subprocess
import tempfile


def check_drawing(test, plot, rows):
    """That `plot` makes a picture of `rows`, the output of --json. Skips the test where there is no matplotlib."""
    with tempfile.TemporaryDirectory() as directory:
        rows_file = pathlib.Path(directory) / "rows.json"
        rows_file.write_text(rows)
        picture = pathlib.Path(directory) / "picture.png"
        drawn = subprocess.run([plot, str(rows_file), "--out", str(picture)], capture_output=True, text=True, timeout=60,
                               check=False)
        if "matplotlib is missing" in drawn.stderr:
            test.skipTest(drawn.stderr)
        test.assertEqual(drawn.returncode, 0, drawn.stderr)
        test.assertEqual(picture.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
