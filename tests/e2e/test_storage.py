# SPDX-License-Identifier: Apache-2.0
"""Committed steps are persisted to storage and restored from it: a directory, and a strict S3 server."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import urllib.request

import pytest
from harness import ROOT, WAIT_S, Cluster, Daemon, ask, environment, payload, wait_until

import ropeteam
from ropeteam import Level

SERVER = ROOT / "tests" / "storage" / "s3" / "server" / "strict_s3.py"
RANK_BYTES = 5_000_000


class Directory:
    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.url = str(path)
        path.mkdir(exist_ok=True)

    def files(self) -> dict[str, int]:
        found = {}
        for folder, _, names in os.walk(self.path):
            for name in names:
                file = pathlib.Path(folder, name)
                with contextlib.suppress(FileNotFoundError):  # a daemon deletes meanwhile
                    found[str(file.relative_to(self.path))] = file.stat().st_size
        return found

    def damage(self, name: str) -> None:
        with open(self.path / name, "r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)[0]
            file.seek(-1, 2)
            file.write(bytes([last ^ 0x10]))

    def go_away(self) -> None:
        self.path.rename(self.path.with_suffix(".away"))

    def come_back(self) -> None:
        self.path.with_suffix(".away").rename(self.path)


class Bucket:
    def __init__(self, port: int) -> None:
        self.control = f"http://127.0.0.1:{port}/_control"
        self.url = f"s3://bucket/runs?endpoint=http://127.0.0.1:{port}&region=us-east-1"

    def files(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.control}/state", timeout=WAIT_S) as answer:
            objects = json.load(answer)["objects"]["bucket"]
        return {key.removeprefix("runs/"): entry["size"] for key, entry in objects.items()}

    def fault(self, **fault: object) -> None:
        request = urllib.request.Request(f"{self.control}/fault", json.dumps(fault).encode(), method="POST")
        urllib.request.urlopen(request, timeout=WAIT_S).close()


@pytest.fixture
def bucket(monkeypatch):
    """The strict S3 server. A test names it before `cluster`, so that the daemons end first: without the server they
    would try for two seconds to release their lock."""
    command = [sys.executable, str(SERVER), "--port", "0", "--bucket", "bucket", "--access-key", "key"]
    command += ["--secret-key", "secret", "--until-stdin-closes"]
    server = subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    yield Bucket(json.loads(server.stdout.readline())["port"])
    server.kill()
    server.communicate()


@pytest.fixture(params=["directory", "s3"])
def store(request, tmp_path):
    if request.param == "directory":
        return Directory(tmp_path / "store")
    return request.getfixturevalue("bucket")


def bytes_of(rank: int, step: int) -> bytes:
    return payload(1000 * step + rank, RANK_BYTES + rank)


def save(ranks: list[ropeteam.Client], step: int, **options) -> None:
    for rank, rope in enumerate(ranks):
        rope.save(step, {"data": bytes_of(rank, step), "note": {"rank": rank}}, **options)
    for rope in ranks:
        rope.wait(step, Level.COMMITTED)


def lose(nodes: Cluster) -> None:
    """Kills every daemon and removes the memory of every host."""
    for node in nodes.nodes:
        node.kill(drop_memory=True)


def start_again(nodes: Cluster) -> None:
    for node in nodes.nodes:
        node.start(wait=False)
    nodes.wait_members(nodes.size)


def world(nodes: Cluster, token: str) -> list[ropeteam.Client]:
    return [nodes[rank].open(rank, nodes.size, token) for rank in range(nodes.size)]


def persist_and_lose(nodes: Cluster, steps: list[int]) -> None:
    """A world saves these steps and has them persisted; then its memory is lost."""
    ranks = world(nodes, "first")
    for step in steps:
        save(ranks, step)
        for rope in ranks:
            rope.wait(step, Level.PERSISTED)
    for rope in ranks:
        rope.close()
    lose(nodes)


def restored_with(nodes: Cluster, data, step: int = 1, run: str = "second") -> None:
    """Checks that each rank gets this step as the latest, and loads data(rank) from it."""
    for rank, rope in enumerate(world(nodes, run)):
        assert rope.latest().step == step
        assert rope.load(step)["data"] == data(rank)
        rope.close()


def manifests(store) -> list[str]:
    return [name for name in store.files() if name.endswith("/ropeteam-manifest.json")]


def numbers(store) -> list[int]:
    return sorted(int(name.split("step-")[1][:10]) for name in manifests(store))


def loaded_bytes(node: Daemon) -> int:
    return int(node.local_status()["counters"]["loaded_bytes"])


def test_a_persisted_step_outlives_all_memory_and_each_byte_is_read_once(store, cluster):
    nodes = cluster(3, options=["--storage", store.url, "--persist-every", "2"])
    ranks = world(nodes, "first")
    for step in (1, 2, 3):
        save(ranks, step)
    for rope in ranks:
        rope.wait(2, Level.PERSISTED)
        with pytest.raises(ropeteam.Aborted, match="not due"):
            rope.wait(3, Level.PERSISTED)
        rope.close()
    lose(nodes)
    start_again(nodes)
    ranks = world(nodes, "second")
    for rank, rope in enumerate(ranks):
        assert rope.latest().step == 2
        for other in (rank, (rank + 1) % 3):
            shard = rope.load(2, rank=other)
            assert shard["data"] == bytes_of(other, 2)
            assert shard["note"] == {"rank": other}
    read = sum(loaded_bytes(node) for node in nodes.nodes)
    data = sum(RANK_BYTES + rank for rank in range(3))
    assert data <= read < data + 100_000, "each shard is read by one node, the others have it from there"
    save(ranks, 3, persist=True)
    for rope in ranks:
        rope.wait(3, Level.PERSISTED)
        rope.close()
    assert len(manifests(store)) == 2


def test_a_hole_in_memory_is_filled_from_storage(store, cluster):
    nodes = cluster(3, options=["--storage", store.url])
    ranks = world(nodes, "first")
    save(ranks, 7, persist=True)
    for rope in ranks:
        rope.wait(7, Level.PERSISTED)
        rope.close()
    for node in nodes.nodes[1:]:  # two of three nodes, with one replica: some shard has no copy left
        node.kill(drop_memory=True)
    for node in nodes.nodes[1:]:
        node.start(wait=False)
    nodes.wait_members(3)
    restored_with(nodes, lambda rank: bytes_of(rank, 7), step=7)


def test_a_daemon_killed_while_it_writes_is_finished_by_others_or_itself(store, cluster):
    size = 40_000_000  # three parts: the second begins a second after the first
    nodes = cluster(2, memory="256M", options=["--storage", store.url, "--persist-rate", "16M"])
    ranks = world(nodes, "first")
    for rank, rope in enumerate(ranks):
        rope.save(1, {"data": payload(rank, size)}, persist=True)
    wait_until(lambda: "is being persisted" in "".join(node.log_text() for node in nodes.nodes), "a begin")
    nodes[1].kill()
    assert manifests(store) == [], "nothing counts before all of it is there"
    nodes[1].start()
    ranks[0].wait(1, Level.PERSISTED)
    ranks[1].wait(1, Level.PERSISTED)
    for rope in ranks:
        rope.close()
    lose(nodes)
    start_again(nodes)
    restored_with(nodes, lambda rank: payload(rank, size))


def test_a_damaged_step_is_passed_over_for_the_next_older_one(cluster, tmp_path):
    store = Directory(tmp_path / "store")
    nodes = cluster(2, options=["--storage", store.url, "--persist-every", "1"])
    persist_and_lose(nodes, [1, 2, 3])
    newest = max(name for name in store.files() if name.endswith("rank-00001.safetensors"))
    (store.path / newest).unlink()  # noticed when the step is chosen
    second = max(name for name in store.files() if name.endswith("rank-00001.safetensors"))
    store.damage(second)  # noticed when it is read
    start_again(nodes)
    ranks = world(nodes, "second")
    assert ranks[0].latest().step == 2
    with pytest.raises(ropeteam.Corrupt, match="storage"):
        ranks[1].load(2)
    for rope in ranks:
        rope.close()
    restored_with(nodes, lambda rank: bytes_of(rank, 1), run="third")
    log = "".join(node.log_text() for node in nodes.nodes)
    assert "lacks rank-00001.safetensors" in log and "its manifest says" in log


def test_a_step_s_metadata_come_back_and_bad_ones_stop_no_step(store, cluster):
    nodes = cluster(2, options=["--storage", store.url, "--persist-every", "1"])
    ranks = world(nodes, "first")
    with ranks[0].begin(1) as bad:
        bad._put("ropeteam.metadata", b"{'loss': 1}")  # another program may write this
    ranks[1].save(1, {"data": bytes_of(1, 1)}, metadata={"loss": 0.25, "revision": "é"})
    for rope in ranks:
        rope.wait(1, Level.PERSISTED)
        rope.close()
    log = "".join(node.log_text() for node in nodes.nodes)
    assert re.search(r"metadata of shard .* is left out on storage: .*not a JSON object", log)
    lose(nodes)
    start_again(nodes)
    for rope in world(nodes, "second"):
        with rope.view(1, rank=0) as view, rope.view(1, rank=1) as other:
            assert view.read("ropeteam.metadata") == b"{'loss': 1}"
            assert other.metadata == {"loss": 0.25, "revision": "é"}
            assert other.names() == ["data"]
        rope.close()


def test_only_the_steps_that_a_rule_keeps_stay(store, cluster):
    rules = ["--keep-on-storage", "2", "--keep-every", "4"]
    nodes = cluster(2, options=["--storage", store.url, "--persist-every", "1", *rules])
    ranks = world(nodes, "first")
    for step in range(1, 8):
        save(ranks, step)
        ranks[0].wait(step, Level.PERSISTED)
    for rope in ranks:
        rope.close()

    def folders() -> set[str]:
        return {name.split("/")[1] for name in store.files()} - {"ropeteam-lock"}

    wait_until(lambda: numbers(store) == [4, 6, 7], "the others to be deleted")
    wait_until(lambda: len(folders()) == 3, "their files to be deleted, too")  # the marker is deleted first


def test_a_rank_says_how_many_steps_stay(store, cluster):
    nodes = cluster(3, options=["--storage", store.url])
    ranks = [nodes[1 + rank].open(rank, 2, "first") for rank in range(2)]
    ranks[1].set_policy(persist_every=1, keep_on_storage=2)
    ranks[0].set_policy(keep_on_storage=2)
    with pytest.raises(ropeteam.InvalidArgument) as refused:
        ranks[0].set_policy(keep_on_storage=1)
    assert "keep_on_storage 1 of rank 0, rank 1 has set 2 in this incarnation" in str(refused.value)

    def stay(*steps: int) -> None:
        wait_until(lambda: numbers(store) == list(steps), f"{steps} alone to be on storage")

    def write(*steps: int) -> None:
        for step in steps:
            save(ranks, step)
            ranks[0].wait(step, Level.PERSISTED)

    write(1, 2, 3)
    stay(2, 3)
    nodes[0].kill()  # leader and coordinator; its next instance leads again without that setting
    nodes[0].start()
    nodes.wait_members(3)
    write(4, 5)
    stay(4, 5)
    policy = nodes[0].status()["policy"]
    assert (policy["persist_every"], policy["persist_every_by"]) == (1, "rank 1")
    assert (policy["keep"], policy["keep_by"], policy["doubt"]) == ("--keep-on-storage 2", "rank 1", "")
    shown = ask("status", "--socket", nodes[2].socket).stdout
    assert "storage persists every 1 steps (rank 1)   keeps --keep-on-storage 2 (rank 1)\n" in shown
    for rope in ranks:
        rope.close()
    ranks = [nodes[1 + rank].open(rank, 2, "second") for rank in range(2)]
    ranks[0].set_policy(persist_every=1)
    write(6, 7)
    stay(4, 5, 6, 7)  # no rank of this incarnation has set how many steps to keep
    for rope in ranks:
        rope.close()


def test_every_daemon_is_restarted_and_the_ranks_say_it_again(cluster, tmp_path):
    store = Directory(tmp_path / "store")
    nodes = cluster(2, options=["--storage", store.url])
    ranks = world(nodes, "first")
    ranks[0].set_policy(persist_every=1, keep_on_storage=1)
    for node in nodes.nodes:
        node.kill()
    start_again(nodes)
    for step in (1, 2):
        save(ranks, step)
        ranks[0].wait(step, Level.PERSISTED)
    wait_until(lambda: numbers(store) == [2], "step 1 to be deleted")
    for rope in ranks:
        rope.close()


def test_a_rank_that_contradicts_a_flag_is_refused(cluster, tmp_path):
    store = Directory(tmp_path / "store")
    flags = ["--persist-every", "100", "--keep-on-storage", "3", "--keep-within", "1h"]
    nodes = cluster(2, options=["--storage", store.url, *flags])
    ranks = world(nodes, "first")
    with pytest.raises(ropeteam.InvalidArgument) as refused:
        ranks[1].set_policy(keep_on_storage=5)
    started = "this job's daemons were started with"
    assert f"keep_on_storage 5, {started} --keep-on-storage 3 --keep-within 3600s" in str(refused.value)
    with pytest.raises(ropeteam.InvalidArgument) as refused:
        ranks[1].set_policy(persist_every=50)
    assert f"persist_every 50, {started} --persist-every 100" in str(refused.value)
    ranks[1].set_policy(persist_every=100, keep_on_storage=3)
    policy = nodes[0].status()["policy"]
    assert (policy["persist_every_by"], policy["keep_by"]) == ("flag", "flag")
    for rope in ranks:
        rope.close()


def test_the_step_with_the_best_metadata_stays(store, cluster):
    rules = ["--keep-on-storage", "1", "--keep-best", "loss:min"]
    nodes = cluster(2, options=["--storage", store.url, "--persist-every", "1", *rules])
    ranks = world(nodes, "first")
    losses = {1: 0.5, 2: 0.25, 3: 0.75, 4: float("nan"), 5: 0.3}
    for step, loss in losses.items():
        ranks[0].save(step, {"data": bytes_of(0, step)})
        ranks[1].save(step, {"data": bytes_of(1, step)}, metadata={"loss": loss, "step": step})
        ranks[0].wait(step, Level.PERSISTED)
    wait_until(lambda: len(manifests(store)) == 2, "the others to be deleted")
    kept = {step.step: step.metadata for step in ranks[0].storage_steps()}
    assert kept == {2: {"loss": 0.25, "step": 2}, 5: {"loss": 0.3, "step": 5}}
    for rope in ranks:
        rope.close()


def test_training_does_not_notice_storage_that_is_away(cluster, tmp_path):
    store = Directory(tmp_path / "store")
    nodes = cluster(2, memory="96M", options=["--storage", store.url, "--persist-every", "1"])
    ranks = world(nodes, "first")
    store.go_away()
    for step in (1, 2, 3, 4):
        save(ranks, step)
    wait_until(lambda: "trying again" in "".join(node.log_text() for node in nodes.nodes), "a line that says why")
    store.come_back()
    ranks[0].wait(4, Level.PERSISTED)
    for rope in ranks:
        rope.close()


def test_a_bucket_that_answers_500_and_loses_answers(bucket, cluster):
    bucket.fault(kind="status", match={"method": "PUT"}, status=500, count=3)
    bucket.fault(kind="lost_ack", match={"method": "PUT"}, nth=4, count=2)
    nodes = cluster(2, options=["--storage", bucket.url, "--persist-every", "1"])
    ranks = world(nodes, "first")
    save(ranks, 1)
    ranks[0].wait(1, Level.PERSISTED)
    for rope in ranks:
        rope.close()
    lose(nodes)
    start_again(nodes)
    restored_with(nodes, lambda rank: bytes_of(rank, 1))


def test_what_lies_on_storage_is_listed_and_the_newest_of_it_is_asked_for(store, cluster, tmp_path):
    nodes = cluster(2, options=["--storage", store.url, "--persist-every", "1"])
    ranks = world(nodes, "first")
    assert ranks[1].storage_steps() == []
    assert ranks[0].latest(level=Level.PERSISTED) is None
    for step in (1, 2):
        save(ranks, step)
        ranks[0].wait(step, Level.PERSISTED)
    newest = ranks[1].latest(level=Level.PERSISTED)
    assert newest.step == 2
    listed = ranks[1].storage_steps()
    folders = sorted({name.split("/")[1] for name in manifests(store)}, reverse=True)
    assert [step.folder for step in listed] == folders
    for step, number in zip(listed, (2, 1)):
        assert (step.step, step.incarnation, step.world_size) == (number, newest.incarnation, 2)
        assert step.bytes > 2 * RANK_BYTES and abs(step.time - time.time()) < 3600 and step.problem == ""
    assert ranks[1].storage_steps(limit=1) == listed[:1]
    (tmp_path / "copy").mkdir()
    ropeteam.export(listed[0].folder, tmp_path / "copy", storage=store.url)
    assert (tmp_path / "copy" / "test" / folders[0] / "ropeteam-manifest.json").exists()
    with pytest.raises(ropeteam.NotFound):
        ropeteam.export(3, tmp_path / "copy", storage=store.url)
    (tmp_path / "memory").mkdir()
    ropeteam.export(2, tmp_path / "memory", socket=nodes[0].socket)
    assert (tmp_path / "memory" / "test" / folders[0] / "ropeteam-manifest.json").exists()
    if isinstance(store, Directory):
        next((store.path / "test" / folders[0]).glob("*.safetensors")).unlink()
        damaged, good = ranks[1].storage_steps()
        assert "lacks" in damaged.problem and (damaged.step, damaged.world_size) == (2, 0)
        assert good == listed[1]
        store.go_away()
        with pytest.raises(ropeteam.RopeteamError, match=str(store.path)):
            ranks[1].storage_steps()
    for rope in ranks:
        rope.close()


def test_without_storage_it_is_said_so(cluster):
    nodes = cluster(1)
    rope = nodes[0].open(0, 1, "run")
    rope.save(1, {"data": b"x"}, wait=Level.COMMITTED)
    for call in (
        lambda: rope.wait(1, Level.PERSISTED),
        lambda: rope.persist(1),
        lambda: rope.latest(level=Level.PERSISTED),
        rope.storage_steps,
    ):
        with pytest.raises(ropeteam.Unsupported, match="no storage"):
            call()
    rope.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://somewhere/x", "unknown scheme"),
        ("relative/path", "neither an absolute path"),
        ("s3://", "bucket"),
        ("/proc/self/exe", "directory"),
        ("/no/such/directory", "/no/such/directory"),
    ],
)
def test_a_url_that_cannot_be_is_refused_at_the_start(tmp_path, url, words):
    from harness import ROPETEAMD

    command = [str(ROPETEAMD), "--job", "test", "--memory", "64M", "--arena-path", str(tmp_path), "--storage", url]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode != 0
    assert words in done.stderr, done.stderr
