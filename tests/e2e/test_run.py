# SPDX-License-Identifier: Apache-2.0
"""What `ropeteam run` chooses, and what it tells whoever started it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import tempfile

from harness import ROPETEAM, WAIT_S, environment


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("ropeteam run:")]


def test_with_a_config_file_the_daemon_logs_where_it_does_without(tmp_path):
    job = pathlib.Path(tempfile.mkdtemp(prefix="config-", dir="/dev/shm"))
    log = pathlib.Path(f"/tmp/ropeteam-{os.geteuid()}/{job.name}-node-0.log")
    config = tmp_path / "daemon.conf"
    config.write_text(
        f'# a job of its own\njob = "{job.name}"  # and no node\narena-path = "{job}"\nmemory = 64M\n'
    )
    try:
        done = subprocess.run(
            [str(ROPETEAM), "run", "--config", str(config), "--remove-arena-at-exit", "--", "sh", "-c", "echo $ROPETEAM_JOB"],
            env=environment(), capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, f"{job.name}\n"), done.stderr
        assert " info " not in done.stderr, "the daemon's log belongs into its file"
        assert told(done)[0] == (
            f"ropeteam run: the daemon's settings {config} (--config), log-file {log} (default)"
        )
        assert "ready socket" in log.read_text()
        elsewhere = tmp_path / "elsewhere.log"
        config.write_text(config.read_text() + f"log-file = '{elsewhere}'\n")
        log.unlink()
        done = subprocess.run(
            [str(ROPETEAM), "run", "--config", str(config), "--remove-arena-at-exit", "--", "true"],
            env=environment(), capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "ready socket" in elsewhere.read_text() and not log.exists()
    finally:
        log.unlink(missing_ok=True)
        job.rmdir()
