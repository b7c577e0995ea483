# SPDX-License-Identifier: Apache-2.0
"""Checks the scripts/plot-* that draw rows of ropeteam-bench."""

import pathlib
import subprocess
import tempfile


def check_drawing(test, plot, rows):
    """Checks that `plot` draws a picture of `rows`, the output of --json. Skips the test without matplotlib."""
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
