# SPDX-License-Identifier: Apache-2.0
"""A job restores another job's step from storage (--restore-from)."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from harness import ROPETEAMD, environment, payload, wait_until
from test_storage import (  # noqa: F401  (two fixtures)
    Directory,
    bucket,
    bytes_of,
    lose,
    persist_and_lose,
    save,
    start_again,
    store,
    world,
)
from test_storage_cli import MANIFEST, manifest_text, snapshot

import ropeteam
from ropeteam import Level


def source_url(store, job: str) -> str:  # noqa: F811
    path, question, parameters = store.url.partition("?")
    return f"{path}/{job}{question}{parameters}"


def persisted(cluster, store, steps: list[int], ranks: int = 2):  # noqa: F811
    """Job a saves and persists these steps; then its daemons and their memory are lost."""
    nodes = cluster(ranks, options=["--storage", store.url, "--persist-every", "1"], job="a")
    persist_and_lose(nodes, steps)


@pytest.fixture(scope="module")
def saved_once(module_cluster, tmp_path_factory):
    """A directory with step 10 of job a, which two ranks saved."""
    store = Directory(tmp_path_factory.mktemp("a") / "store")  # noqa: F811
    persisted(module_cluster, store, [10])
    return store.path


@pytest.fixture
def step_10(saved_once, tmp_path):
    """A copy of that directory for each test."""
    shutil.copytree(saved_once, tmp_path / "a" / "store")
    return Directory(tmp_path / "a" / "store")


def check(ropes: list[ropeteam.Client], step: int, ranks: int = 2) -> None:
    for rope in ropes:
        assert (rope.latest().step, rope.latest().world_size) == (step, ranks)
        for rank in range(ranks):
            shard = rope.load(step, rank=rank)
            assert shard["data"] == bytes_of(rank, step)
            assert shard["note"] == {"rank": rank}


def close(ropes: list[ropeteam.Client]) -> None:
    for rope in ropes:
        rope.close()


def test_a_job_begins_from_another_jobs_step_and_goes_on_with_its_own(store, cluster):  # noqa: F811
    persisted(cluster, store, [10, 20])
    before = {name: size for name, size in store.files().items() if name.startswith("a/")}
    options = ["--storage", store.url, "--persist-every", "1", "--restore-from", source_url(store, "a")]
    nodes = cluster(2, options=options, job="b")
    ropes = world(nodes, "first")
    check(ropes, 20)
    save(ropes, 21)
    for rope in ropes:
        rope.wait(21, Level.PERSISTED)
    close(ropes)
    assert any(name.startswith("b/step-0000000021-") for name in store.files())
    lose(nodes)
    start_again(nodes)
    ropes = world(nodes, "second")
    check(ropes, 21)
    close(ropes)
    files = {name: size for name, size in store.files().items() if name.startswith("a/")}
    assert files == before


def test_the_source_is_read_only_and_is_not_needed_any_more(cluster, tmp_path):
    store = Directory(tmp_path / "store")  # noqa: F811
    other = Directory(tmp_path / "other")
    persisted(cluster, store, [10, 20])
    before = snapshot(store.path)
    options = ["--storage", other.url, "--persist-every", "1", "--keep-on-storage", "1"]
    options += ["--restore-from", f"{store.url}/a@10"]
    nodes = cluster(2, options=options, job="b")
    ropes = world(nodes, "first")
    check(ropes, 10)
    for step in (11, 12):
        save(ropes, step)
        for rope in ropes:
            rope.wait(step, Level.PERSISTED)
    close(ropes)
    assert snapshot(store.path) == before, "pruning the job's own steps touches those of no other job"
    lose(nodes)
    shutil.rmtree(store.path)
    start_again(nodes)
    ropes = world(nodes, "second")
    check(ropes, 12)
    close(ropes)


def test_memory_wins_also_over_newer_steps_of_the_source(cluster, step_10):
    nodes = cluster(2, options=["--restore-from", f"{step_10.url}/a"], job="b")
    ropes = world(nodes, "first")
    check(ropes, 10)
    with pytest.raises(ropeteam.Unsupported, match="no storage"):
        ropes[0].persist(10)
    save(ropes, 11)
    close(ropes)
    persisted(cluster, step_10, [30])  # job a has continued in a later incarnation
    ropes = world(nodes, "second")
    check(ropes, 11)
    close(ropes)


def test_a_world_of_another_size_begins_from_it(cluster, tmp_path):
    store = Directory(tmp_path / "store")  # noqa: F811
    persisted(cluster, store, [10], ranks=3)
    nodes = cluster(1, options=["--restore-from", f"{store.url}/a@10"], job="b")
    ropes = world(nodes, "first")
    check(ropes, 10, ranks=3)
    close(ropes)


def test_a_source_that_cannot_be_read_is_waited_for(cluster, step_10):
    step_10.go_away()
    nodes = cluster(1, options=["--restore-from", f"{step_10.url}/a"], job="b")
    with pytest.raises(ropeteam.RopeteamError, match="storage.*--restore-from.*/a"):
        nodes[0].open(0, 1, "first", timeout=2)
    step_10.come_back()
    rope = nodes[0].open(0, 1, "first")
    check([rope], 10)
    rope.close()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a@11", "there is no such step, the newest is 10"),
        ("", "must be a job's"),
        ("c", "/c"),
    ],
)
def test_a_source_without_the_step(cluster, step_10, source, words):
    nodes = cluster(1, options=["--restore-from", f"{step_10.url}/{source}"], job="b")
    with pytest.raises(ropeteam.RopeteamError, match=words):
        nodes[0].open(0, 1, "first", timeout=2)


def test_a_source_with_no_good_step_is_an_error_and_not_a_beginning_from_nothing(cluster, tmp_path):
    store = Directory(tmp_path / "store")  # noqa: F811
    persisted(cluster, store, [10, 20])
    for step in (store.path / "a").glob("step-*"):
        number = int(step.name[5:15])
        files = [{f"rank-{rank:05d}.safetensors": payload(rank, 5000)} for rank in range(2)]
        text = manifest_text("a", number, int(step.name.split("-i")[1]), files, version=2)
        (step / MANIFEST).write_bytes(text)
    nodes = cluster(1, options=["--restore-from", f"{store.url}/a"], job="b")
    rope = nodes[0].open(0, 1, "first")
    with pytest.raises(ropeteam.Corrupt, match="version 2, this build reads up to 1"):
        rope.latest()
    rope.close()


def test_another_source_than_the_jobs_is_refused(cluster, tmp_path):
    nodes = cluster(2, options=["--restore-from", f"{tmp_path}/a@3"])
    nodes[1].stop()
    nodes[1].options = ["--restore-from", f"{tmp_path}/a@4"]
    nodes[1].start(wait=False)
    words = f"--restore-from {tmp_path}/a@4, the job runs with --restore-from {tmp_path}/a@3"
    wait_until(lambda: words in nodes[1].log_text(), "the refusal")
    nodes[1].process.wait()
    nodes[1].process = None


def test_a_source_that_is_no_url_is_refused_at_the_start():
    done = subprocess.run(
        [str(ROPETEAMD), "--job", "b", "--memory", "64M", "--restore-from", "store/a"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "--restore-from: storage URL store/a" in done.stderr
