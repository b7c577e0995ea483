# SPDX-License-Identifier: Apache-2.0
"""Quarantine of a step after which every world that restores it fails."""

from __future__ import annotations

import json
import logging
import sys

from harness import ask, payload, wait_until

# Saves steps 1 and 2. If it has restored step 2, it exits with 1 once the restore is noted on storage.
JOB = """
import glob, sys, time
import ropeteam

storage, attempt = sys.argv[1], int(sys.argv[2])
def noted():
    paths = glob.glob(storage + "/test/step-0000000002-*/ropeteam-restored.txt")
    return open(paths[0]).read() if paths else ""
with ropeteam.open() as rope:
    found = rope.latest()
    if found is None:
        for step in (1, 2):
            rope.save(step, {"data": b"x" * step})
            rope.persist(step)
            rope.wait(step, ropeteam.Level.PERSISTED)
        sys.exit(0)
    print("restored", found.step, "passed over", found.passed_over)
    assert rope.load(found.step)["data"] == b"x" * found.step
    if found.step < 3:
        # A run that ends sooner may take its note along.
        awaited = f"restores {attempt}\\n" if found.step == 2 else "quarantined 1\\n"
        end = time.monotonic() + 60
        while awaited not in noted() and time.monotonic() < end:
            time.sleep(0.01)
    if found.step == 2:
        sys.exit(1)
    rope.save(3, {"data": b"x" * 3}, wait=ropeteam.Level.COMMITTED)
"""


def test_a_step_that_ends_every_run_is_replaced_by_the_one_before(run_ropeteam, tmp_path):
    storage = tmp_path / "storage"
    storage.mkdir()

    def run(attempt: int):
        return run_ropeteam(
            sys.executable, "-c", JOB, str(storage), str(attempt),
            options=["--job", "test", "--storage", str(storage), "--persist-every", "1000"], RANK="0", WORLD_SIZE="1",
        )  # fmt: skip

    done = run(0)
    assert done.returncode == 0, done.stderr
    for attempt in (1, 2, 3):
        done = run(attempt)
        assert (done.returncode, done.stdout) == (1, "restored 2 passed over None\n"), done.stderr
    done = run(4)
    assert (done.returncode, done.stdout) == (0, "restored 1 passed over 2\n"), done.stderr
    assert "step 2 is quarantined, step 1 is offered instead" in done.stderr, "the rank is told"
    done = run(5)
    assert (done.returncode, done.stdout) == (0, "restored 3 passed over None\n"), done.stderr
    done = ask("ls", "--storage", str(storage), "--json")
    states = {step["step"]: step["state"] for step in json.loads(done.stdout)["jobs"][0]["steps"]}
    assert states == {1: "complete", 2: "quarantined"}


def test_by_hand_and_undone(cluster, caplog):
    from ropeteam import Level

    nodes = cluster(2, options=["--replicas", "1"])
    with nodes[0].open(0, 1, "first") as rope:
        for step in (1, 2):
            rope.save(step, {"data": payload(step, 1000)}, wait=Level.COMMITTED)

    def quarantine(*arguments: str):
        return ask("quarantine", *arguments, "--socket", nodes[1].socket)

    done = quarantine("7")
    assert done.returncode == 1 and "step 7" in done.stderr
    for wrong in ((), ("one",), ("1", "2"), ("1", "--json"), ("1", "--force"), ("1", "--job", "")):
        done = quarantine(*wrong)
        assert done.returncode == 2 and "ropeteam quarantine --help" in done.stderr, wrong
    done = quarantine("2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "step 2 is quarantined: the next incarnation is offered an older one, if there is one\n"
    status = ask("status", "--socket", nodes[0].socket).stdout
    assert "latest step 1 " in status and "quarantined step 2 " in status
    with nodes[0].open(0, 1, "second") as rope, caplog.at_level(logging.WARNING, "ropeteam"):
        found = rope.latest()
        assert (found.step, found.passed_over) == (1, 2)
        assert "step 2 is quarantined, step 1 is offered instead" in caplog.text
        assert rope.load(2)["data"] == payload(2, 1000), "by its number it is read"
    assert wait_until(lambda: "is quarantined: by hand" in nodes[0].log_text() + nodes[1].log_text(), "the log")
    done = quarantine("2", "--undo")
    assert (done.returncode, done.stdout) == (0, "step 2 is offered again\n")
    with nodes[0].open(0, 1, "third") as rope:
        found = rope.latest()
        assert (found.step, found.passed_over) == (2, None)
