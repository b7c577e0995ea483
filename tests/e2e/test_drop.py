# SPDX-License-Identifier: Apache-2.0
"""An operator drops a step with `ropeteam drop`."""

from __future__ import annotations

import pytest

import ropeteam
from harness import ask, payload


def test_a_dropped_step_is_gone_from_every_node_and_the_newest_is_refused(cluster):
    nodes = cluster(2, options=["--replicas", "1", "--keep-steps", "3"])

    def drop(*arguments: str):
        return ask("drop", *arguments, "--socket", nodes[1].socket)

    with nodes[0].open(0, 1) as rope:
        for step in (1, 2, 3):
            rope.save(step, {"data": payload(step, 1000)}, wait=ropeteam.Level.COMMITTED)
        done = drop("2")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == (
            "step 2 is released: no node of the job has a copy in memory; what is on storage stays\n"
        )
        with pytest.raises(ropeteam.NotFound):
            rope.load(2)
    # Dropping works without an open rank, too.
    done = drop("3")
    assert done.returncode == 1
    assert "step 3 incarnation 1 is not dropped: a restart needs the newest committed step" in done.stderr
    done = drop("7")
    assert done.returncode == 1 and "step 7" in done.stderr
    assert drop("1").returncode == 0
    assert [step["step"] for step in nodes[0].status()["steps"]] == [3]
    for wrong in ((), ("one",), ("1", "2"), ("1", "--undo"), ("1", "--json")):
        done = drop(*wrong)
        assert done.returncode == 2 and "ropeteam drop --help" in done.stderr, wrong
    done = drop("--help")
    assert done.returncode == 0 and done.stdout.startswith("ropeteam drop STEP: ")
