# SPDX-License-Identifier: Apache-2.0
"""A daemon's metrics, and what Debian's Prometheus reads from them."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest
from harness import ROOT, ROPETEAMD, WAIT_S, Cluster, Daemon, environment, free_port, payload, wait_until

from ropeteam import Level

SIZE = 9_000_000  # three chunks of 4 MiB
SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
DASHBOARD = ROOT / "docs" / "grafana-dashboard.json"


def program(name: str) -> str:
    """A program of the distribution's Prometheus: installed, or unpacked by scripts/test."""
    unpacked = ROOT / "build" / "prometheus" / "usr" / "bin" / name
    found = shutil.which(name) or (str(unpacked) if unpacked.exists() else None)
    if found is None:
        pytest.skip(f"{name} is not installed, nor unpacked in build/prometheus")
    return found


@pytest.fixture(scope="module", autouse=True)
def _built_with_metrics() -> None:
    command = [str(ROPETEAMD), "--job", "j", "--metrics", "1", "--arena-path", "/nonexistent"]
    said = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=WAIT_S).stderr
    if "this build has no metrics" in said:
        pytest.skip(said.strip().splitlines()[-1])


def with_metrics(cluster, nodes: int, **more) -> tuple[Cluster, list[str]]:
    """A cluster, and the ADDRESS:PORT of each node's metrics."""
    addresses = [f"127.0.0.{node + 1}" for node in range(nodes)]
    targets = [f"{address}:{free_port(address)}" for address in addresses]
    return cluster(nodes, node_options=[["--metrics", target] for target in targets], **more), targets


def text_of(target: str) -> str:
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=WAIT_S) as answer:
        return answer.read().decode()


def samples(target: str) -> dict[tuple, float]:
    """The samples by (name, label, label, …); labels are "name=value", in the order of the text."""
    found = {}
    for line in text_of(target).splitlines():
        if not line.startswith("#"):
            name, labels, value = SAMPLE.fullmatch(line).groups()
            found[name, *(f"{key}={text}" for key, text in LABEL.findall(labels or ""))] = float(value)
    return found


def test_metrics_are_served_at_an_ipv6_address(cluster):
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 on loopback")
        target = f"[::1]:{probe.getsockname()[1]}"
    cluster(1, options=["--metrics", target])
    assert "ropeteam_event_loop_answered 1" in text_of(target)


def test_a_save_is_counted_on_both_nodes(cluster):
    nodes, targets = with_metrics(cluster, 2)
    with nodes[0].open(0, 1) as rope:
        rope.save(1, {"data": payload(1, SIZE)}, wait=Level.COMMITTED)
    source, holder = samples(targets[0]), samples(targets[1])
    assert source["ropeteam_event_loop_answered",] == 1
    assert source["ropeteam_members",] == source["ropeteam_nodes_expected",] == 2
    assert source["ropeteam_leader",] + holder["ropeteam_leader",] == 1
    wait_until(lambda: 0 < samples(targets[0])["ropeteam_lease_remaining_seconds",] < 1, "a lease")
    assert source["ropeteam_saves_total", "result=sealed"] == 1
    sent = source["ropeteam_peer_bytes_total", "peer=node-1", "direction=sent"]
    assert sent > SIZE and source["ropeteam_bytes_total", "direction=sent"] == sent
    assert holder["ropeteam_peer_bytes_total", "peer=node-0", "direction=held"] == sent
    assert source["ropeteam_peer_chunks_total", "peer=node-1", "direction=sent"] == 3
    for level in ("local", "replicated", "committed"):
        assert source["ropeteam_level_seconds_count", f"level={level}"] == 1, level
        assert source["ropeteam_level_seconds_sum", f"level={level}"] > 0, level
    assert source["ropeteam_level_seconds_count", "level=persisted"] == 0
    assert source["ropeteam_newest_step", "level=committed"] == 1
    chunk = 4 << 20
    assert source["ropeteam_arena_bytes", "role=own"] == 3 * chunk
    assert holder["ropeteam_arena_bytes", "role=replica"] == 3 * chunk
    total = nodes[0].local_status()["chunks_total"]
    assert sum(value for key, value in source.items() if key[0] == "ropeteam_arena_bytes") == total * chunk


def test_series_do_not_grow_with_steps(cluster):
    nodes, targets = with_metrics(cluster, 2, options=["--keep-steps", "20"])
    with nodes[0].open(0, 1) as rope:
        rope.save(1, {"data": b"x"}, wait=Level.COMMITTED)
        before = set(samples(targets[0]))
        for step in range(2, 12):
            rope.save(step, {"data": b"x"}, wait=Level.COMMITTED)
        assert len(nodes[0].local_status()["copies"]) == 11
        assert set(samples(targets[0])) == before
    assert not [key for key in before for label in key[1:] if label.startswith("step=")]


def test_promtool_finds_nothing_to_say(cluster):
    promtool = program("promtool")
    nodes, targets = with_metrics(cluster, 2)
    with nodes[0].open(0, 1) as rope:
        rope.save(1, {"data": payload(1, SIZE)}, wait=Level.COMMITTED)
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text_of(targets[0]), capture_output=True, text=True, timeout=WAIT_S
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_the_leader_measures_how_long_full_redundancy_took(cluster):
    nodes, targets = with_metrics(cluster, 3)
    with nodes[0].open(0, 1) as rope:
        rope.save(1, {"data": payload(1, SIZE)}, wait=Level.COMMITTED)
        holder = next(n for n in (1, 2) if samples(targets[n])["ropeteam_arena_shards", "role=replica"] == 1)
        other = 3 - holder
        nodes[holder].kill(drop_memory=True)
        left = [targets[0], targets[other]]
        wait_until(lambda: all(samples(target)["ropeteam_members",] == 2 for target in left), "a view of two")
        leader = next(target for target in left if samples(target)["ropeteam_leader",])
        seen = wait_until(
            lambda: (now := samples(leader))["ropeteam_recovery_seconds_count",] == 1 and now, "full redundancy"
        )
        assert seen["ropeteam_recovering",] == 0 and seen["ropeteam_members_lost_total",] == 1
        assert samples(targets[other])["ropeteam_arena_shards", "role=replica"] == 1, "the copy was made again"


def test_strangers_that_send_half_a_request_are_cut_off(cluster):
    nodes, targets = with_metrics(cluster, 1)
    host, port = targets[0].split(":")
    strangers = [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(2)]
    for stranger in strangers:
        stranger.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
    with nodes[0].open(0, 1) as rope:
        rope.save(1, {"data": b"x"}, wait=Level.COMMITTED)  # the daemon does not wait for the strangers
    for stranger in strangers:
        while stranger.recv(4096):
            pass  # ends when the daemon has closed the connection
    assert samples(targets[0])["ropeteam_saves_total", "result=sealed"] == 1


def test_a_port_that_is_taken_is_refused_before_memory_is_taken(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [str(ROPETEAMD), "--job", "test", "--memory", "64M", "--socket", str(tmp_path / "r.sock")]
        command += ["--arena-path", str(tmp_path), "--metrics", port]
        refused = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=WAIT_S)
    assert refused.returncode == 1 and f"--metrics 127.0.0.1:{port}" in refused.stderr
    assert list(tmp_path.iterdir()) == []


class Prometheus:
    def __init__(self, folder: pathlib.Path, targets: list[str]) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        config = {
            "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
            "scrape_configs": [{"job_name": "ropeteam", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self.log = open(folder / "prometheus.log", "wb")
        self.process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.address}",
                "--web.console.templates=/nonexistent",
            ],
            stdout=self.log,
            stderr=self.log,
        )

    def query(self, expression: str) -> list:
        url = f"http://{self.address}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
                return list(json.load(answer)["data"]["result"])
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return []  # Prometheus is starting
            pytest.fail(f"{expression}: {error.read().decode()}")
        except (urllib.error.URLError, ConnectionError):
            assert self.process.poll() is None, pathlib.Path(self.log.name).read_text()
            return []  # Prometheus is starting

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture
def prometheus(tmp_path: pathlib.Path) -> Iterator:
    started: list[Prometheus] = []

    def start(targets: list[str]) -> Prometheus:
        started.append(Prometheus(tmp_path, targets))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def queries() -> list[tuple[str, str]]:
    """The queries of the dashboard's panels, with the variables replaced."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
            assert "$" not in expression, expression
            found.append((panel["title"], expression))
    return found


def test_every_query_of_the_dashboard_has_an_answer(cluster, prometheus, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    nodes, targets = with_metrics(cluster, 2, options=["--storage", str(store), "--persist-every", "1"])
    watching: Prometheus = prometheus(targets)
    with nodes[0].open(0, 1) as rope:
        rope.save(1, {"data": payload(1, SIZE)}, wait=Level.PERSISTED)
        wait_until(
            lambda: len(watching.query('ropeteam_steps_total{level="persisted"} >= 1')) == 2, "both to be scraped"
        )
        rope.save(2, {"data": payload(2, SIZE)}, wait=Level.PERSISTED)
        wait_until(
            lambda: len(watching.query('rate(ropeteam_steps_total{level="persisted"}[1m]) > 0')) == 2, "two scrapes"
        )
        for title, expression in queries():
            assert watching.query(expression), f"{title}: {expression}"
    named = {name for _, expression in queries() for name in re.findall(r"ropeteam_\w+", expression)}
    given = {key[0] for key in samples(targets[0])}
    assert named <= given, "every name in the dashboard is one of the daemon's"
    assert len(queries()) > 30
