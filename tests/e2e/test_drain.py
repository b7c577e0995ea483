# SPDX-License-Identifier: Apache-2.0
"""A node is drained: by command, by SIGTERM, and because its cloud takes the machine away."""

from __future__ import annotations

import http.server
import json
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest
from harness import ROPETEAM, WAIT_S, Daemon, ask, payload, verify, wait_until

MIB = 1 << 20


def ended(node: Daemon) -> int:
    """Waits for a daemon that ends by itself, and returns its exit code."""
    assert node.process is not None
    code = node.process.wait(WAIT_S)
    node.process = None
    return code


def save_everywhere(nodes, size: int, step: int = 1) -> None:
    from ropeteam import Level

    ranks = [node.open(rank, nodes.size, "run") for rank, node in enumerate(nodes.nodes)]
    for rank, rope in enumerate(ranks):
        rope.save(step, {"data": payload(rank, size)})
    for rope in ranks:
        rope.wait(step, Level.COMMITTED, timeout=WAIT_S)
    for rope in ranks:
        rope.close()


def test_what_a_node_holds_is_redundant_before_it_leaves(cluster):
    nodes = cluster(3, memory="400M")
    save_everywhere(nodes, 64 * MIB)
    assert sum(copy["stream_bytes"] for copy in nodes[1].local_status()["copies"]) > 128 * MIB
    done = ask("drain", "--socket", nodes[1].socket)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == (
        "this node has left the job: all that is kept is redundant on other nodes, and what was due is on storage\n"
    )
    # The copying may end before its progress is asked for the first time.
    assert not done.stderr or re.search(r"^copied to other nodes: (\S+ MiB) of \1, ", done.stderr), done.stderr
    assert ended(nodes[1]) == 0
    nodes.wait_members(2)
    checked = verify(nodes[0])  # fails if a rank has fewer copies than it was saved with
    assert checked.returncode == 0, checked.stdout
    # It returns under its name, with its memory.
    nodes[1].start()
    nodes.wait_members(3)
    rope = nodes[1].open(1, 3, "next")
    assert rope.load(1)["data"] == payload(1, 64 * MIB)
    rope.close()


def test_with_too_few_nodes_the_exit_code_says_so(cluster):
    nodes = cluster(2)
    save_everywhere(nodes, MIB)
    done = ask("drain", "--socket", nodes[1].socket, "--json")
    outcome = json.loads(done.stdout)
    assert (done.returncode, outcome["exit_code"], outcome["shards_short"]) == (5, 5, 2)
    assert outcome["latest_safe"] and outcome["shards_left"] == 0
    assert ended(nodes[1]) == 5
    nodes.wait_members(1)
    done = ask("drain", "--socket", nodes[0].socket)
    assert done.returncode == 6 and "CANNOT be restored without this node" in done.stdout
    assert ended(nodes[0]) == 6


def test_sigterm_drains_where_it_was_asked_for(cluster):
    nodes = cluster(3, options=["--drain-on-term"])
    save_everywhere(nodes, MIB)
    assert nodes[2].stop() == 0
    log = nodes[2].log_text()
    assert "draining within 30 s: SIGTERM" in log and "drained, exit code 0" in log
    nodes.wait_members(2)
    assert verify(nodes[0]).returncode == 0
    for node in nodes.nodes[:2]:  # there is no other node to copy to
        node.process.terminate()
    assert {ended(node) for node in nodes.nodes[:2]} <= {5, 6}


def test_ropeteam_run_does_not_start_a_drained_daemon_again(run_ropeteam, tmp_path):
    notice = tmp_path / "notice"
    script = f"""
        import json, os, pathlib, subprocess, time
        status = [{str(ROPETEAM)!r}, "status", "--local", "--json"]
        pid = json.loads(subprocess.run(status, capture_output=True).stdout)["daemon"]["pid"]
        pathlib.Path({str(notice)!r}).touch()
        while pathlib.Path(f"/proc/{{pid}}").exists():  # until `ropeteam run` has taken note of its end
            time.sleep(0.01)
        os._exit(7)
    """
    options = ["--job", "test", "--notice", f"file:{notice}"]
    done = run_ropeteam(sys.executable, "-c", textwrap.dedent(script), options=options)
    assert done.returncode == 7, done.stderr
    assert f"this node leaves the job ({notice} exists)" in done.stderr
    assert "is not started again; the command goes on without it" in done.stderr
    assert "starting it again" not in done.stderr


def test_a_spare_joins_while_ranks_save_and_stands_in_for_a_lost_node(cluster):
    from ropeteam import Level

    nodes = cluster(2)
    ranks = [nodes[rank].open(rank, 2, "first") for rank in range(2)]
    spare = Daemon(nodes, 2, [])  # beyond --nodes, which stays 2
    nodes.nodes.append(spare)
    spare.start(wait=False)
    step = 0
    while nodes[0].members() < 3 or step < 5:
        step += 1
        for rank, rope in enumerate(ranks):
            rope.save(step, {"data": payload(rank + step, MIB)})
        for rope in ranks:
            rope.wait(step, Level.COMMITTED, timeout=WAIT_S)
    nodes[1].kill(drop_memory=True)
    for rope in ranks:
        rope.close()

    def held() -> set[int]:
        copies = spare.local_status()["copies"]
        return {copy["id"]["rank"] for copy in copies if copy["id"]["step"] == step}

    wait_until(lambda: held() == {0, 1}, "the spare to hold both shards")
    ranks = [node.open(rank, 2, "second") for rank, node in enumerate((nodes[0], spare))]
    for rank, rope in enumerate(ranks):
        assert rope.latest().step == step
        assert rope.load(step)["data"] == payload(rank + step, MIB)
        rope.save(step + 1, {"data": payload(rank, MIB)})
    for rope in ranks:
        rope.wait(step + 1, Level.COMMITTED, timeout=WAIT_S)
        rope.close()


# ---- the metadata of three clouds


class Metadata(http.server.BaseHTTPRequestHandler):
    """Answers as the clouds' metadata servers do. `taken`: whether it gives notice that the machine is taken away."""

    taken = False
    asked: list[str] = []

    def answer(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_PUT(self) -> None:
        good = self.path == "/latest/api/token" and "x-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self.answer(200, "token-1") if good else self.answer(400)

    def do_GET(self) -> None:
        taken = type(self).taken
        answers = {
            "/latest/meta-data/spot/instance-action": '{"action": "terminate", "time": "2026-03-01T12:00:00Z"}'
            if taken
            else None,
            "/latest/meta-data/events/recommendations/rebalance": None,
            "/computeMetadata/v1/instance/preempted": "FALSE",
            "/computeMetadata/v1/instance/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"
            if taken
            else "MIGRATE_ON_HOST_MAINTENANCE",
            "/metadata/instance/compute/name?api-version=2021-02-01&format=text": "vm_2",
            "/metadata/scheduledevents?api-version=2020-07-01": json.dumps(
                {
                    "DocumentIncarnation": 1,
                    "Events": [
                        {"EventId": "a", "EventType": "Preempt", "Resources": ["vm_1"]},
                        {"EventId": "b", "EventType": "Freeze", "Resources": ["vm_2"]},
                        {"EventId": "c", "EventType": "Preempt", "Resources": ["_vm_2"] if taken else []},
                    ],
                }
            ),
        }
        header, value = {
            "l": ("x-aws-ec2-metadata-token", "token-1"),
            "c": ("metadata-flavor", "Google"),
            "m": ("metadata", "true"),
        }[self.path[1]]
        if self.headers.get(header) != value:
            return self.answer(401)
        type(self).asked.append(self.path)
        text = answers.get(self.path)
        self.answer(404) if text is None else self.answer(200, text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[tuple[str, type[Metadata]]]:
    handler = type("Handler", (Metadata,), {"taken": False, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("cloud", "last", "reason"),
    [
        ("aws", "rebalance", 'aws spot/instance-action {"action": "terminate", "time": "2026-03-01T12:00:00Z"}'),
        ("gcp", "maintenance-event", "gcp instance/maintenance-event TERMINATE_ON_HOST_MAINTENANCE"),
        ("azure", "api-version=2020-07-01", "azure scheduled event Preempt"),
    ],
)
def test_a_cloud_that_takes_the_machine_away_drains_it(cluster, metadata, cloud, last, reason):
    endpoint, handler = metadata
    nodes = cluster(1, options=["--notice", cloud, "--notice-endpoint", endpoint])
    wait_until(lambda: any(path.endswith(last) for path in handler.asked), "a look without a notice")
    assert "draining" not in nodes[0].log_text()
    handler.taken = True
    assert ended(nodes[0]) == 0  # it holds nothing that would have to be copied
    assert f"draining within 30 s: {reason}" in nodes[0].log_text()


@pytest.mark.parametrize("children", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_command_s_output_is_the_reason(cluster, tmp_path, children):
    """A command that fails is not a notice, even if the daemon was started with SIGCHLD ignored."""
    notice, asked = tmp_path / "notice", tmp_path / "asked"
    command = f"cmd:touch {asked}; cat {notice}"
    before = signal.signal(signal.SIGCHLD, children)
    try:
        nodes = cluster(1, options=["--notice", command, "--notice-seconds", "5"])
    finally:
        signal.signal(signal.SIGCHLD, before)
    for _ in range(2):  # when it asks for the second time, it has the first answer
        wait_until(asked.exists, "a question")
        asked.unlink()
    assert "draining" not in nodes[0].log_text()
    (tmp_path / "whole").write_text("maintenance at noon\nmore\n")
    (tmp_path / "whole").rename(notice)
    assert ended(nodes[0]) == 0
    assert "draining within 5 s: maintenance at noon" in nodes[0].log_text()
