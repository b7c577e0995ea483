# SPDX-License-Identifier: Apache-2.0
"""The Python benches run, and print the rows that docs/benchmarking.md names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from harness import BUILD, ROOT, clean_environment

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("fsspec", reason="fsspec is not installed")
DOORS = ["torch.save", "dcp.save", "dcp.async_save", "save_state", "ropeteam.dcp", "Checkpointer", "fsspec"]


def rows(name, *options):
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "python" / name), "--json", *options],
        env=clean_environment(ROPETEAM_BUILD=str(BUILD)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}


def test_every_door_is_measured(tmp_path):
    options = ["--size", "8M", "--tensors", "8", "--ranks", "2", "--runs", "1", "--durable-runs", "1"]
    found = rows("bench_dcp.py", *options, "--files", str(tmp_path), "--plot", str(tmp_path / "dcp.png"))
    for door in DOORS:
        assert found[f"dcp/durable/{door}"]["median"] > 0
        assert found[f"dcp/restore/{door}"]["median"] > 0
        assert found[f"dcp/lines/{door}"]["median"] >= 2
        if door != "dcp.async_save":
            beside = found[f"dcp/blocked_vs_async_save/{door}"]
            assert beside["ratio"] == pytest.approx(beside["median"] / beside["baseline_median"])
    assert set(name.split("/")[2] for name in found if name.startswith("dcp/safe/")) == set(DOORS[3:])
    assert found["dcp/blocked_vs_fused_copy"]["ratio"] > 0
    assert (tmp_path / "dcp.png").stat().st_size > 1000
    assert not list(tmp_path.glob("bench-dcp-*"))


def test_many_tensors_are_measured(tmp_path):
    options = ["--size", "8M", "--tensors", "8", "--runs", "1", "--durable-runs", "1", "--doors", "dcp.async_save"]
    found = rows("bench_dcp.py", *options, "--files", str(tmp_path))
    for name in ("Client.save", "ropeteam.dcp"):
        assert found[f"dcp/many_tensors/{name}"]["baseline_name"] == "8 tensors + 5 us each"
        assert found[f"dcp/many_tensors/{name}"]["ratio"] > 0


def test_a_training_step_is_measured():
    found = rows("bench_step.py", "--steps", "10", "--width", "64", "--layers", "2")
    assert found["step/with_save_vs_without"]["runs"] == 10
    assert found["step/cpu_s_per_save"]["median"] >= 0
