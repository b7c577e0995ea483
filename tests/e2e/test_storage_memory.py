# SPDX-License-Identifier: Apache-2.0
"""Copies between a running job's memory and storage: ropeteam export without --storage, and ropeteam import."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

import pytest
from harness import ROPETEAM, WAIT_S, ask, environment, payload
from test_storage import bucket  # noqa: F401  (a fixture)
from test_storage_cli import MANIFEST, flip, manifest_text, refused, snapshot, steps_in, well

from ropeteam import Level

pytestmark = pytest.mark.skipif(not ROPETEAM.exists(), reason=f"{ROPETEAM} is not built")


def save_two_ranks(nodes, step: int = 7, size: int = 3_000_000, **options) -> list:
    ranks = [nodes[rank % nodes.size].open(rank, 2, "first") for rank in range(2)]
    for rank, rope in enumerate(ranks):
        rope.save(step, objects_of(rank, size), **options)
    for rope in ranks:
        rope.wait(step, Level.COMMITTED)
    return ranks


def objects_of(rank: int, size: int = 3_000_000) -> dict:
    return {
        "data": payload(rank, size),
        "note": {"rank": rank},
        "config.json": b'{"shared": true}',
        "part.distcp": payload(10 + rank, 5000 + rank),
        f"model/{rank}.pt": payload(20 + rank, 12_000_000),
        "empty.pt": b"",
    }


def check_two_ranks(nodes, step: int = 7) -> None:
    ranks = [nodes[rank % nodes.size].open(rank, 2, "after") for rank in range(2)]
    for rope in ranks:
        assert rope.latest().step == step
        for rank in range(2):
            assert dict(rope.load(step, rank=rank)) == objects_of(rank)
    for rope in ranks:
        rope.close()


def without_time(files: dict[str, bytes]) -> dict[str, bytes]:
    """The steps' files; manifests are without the time when they were written."""
    kept = {name: data for name, data in files.items() if "/step-" in name}
    for name in [name for name in kept if name.endswith(MANIFEST)]:
        manifest = json.loads(kept[name])
        del manifest["time"], manifest["manifest_crc32c"]
        kept[name] = json.dumps(manifest).encode()
    return kept


def test_an_export_from_memory_is_what_the_daemon_persists(cluster, tmp_path):
    store, other = tmp_path / "store", tmp_path / "other"
    store.mkdir()
    other.mkdir()
    nodes = cluster(2, memory="256M", options=["--storage", str(store)])
    ranks = save_two_ranks(nodes, persist=True)
    for rope in ranks:
        rope.wait(7, Level.PERSISTED)
    done = ask("export", "7", str(other), "--socket", nodes[1].socket)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("export step 7: ")
    assert f"of job test: 10 files, 28.6 MiB, are in {other}/test/step-" in done.stdout
    assert without_time(snapshot(other)) == without_time(snapshot(store))
    assert "all good" in well("verify", str(other), "7")
    before = snapshot(other)
    assert "already" in well("export", "latest", str(other), "--socket", nodes[0].socket)
    assert snapshot(other) == before
    for rank, rope in enumerate(ranks):  # training can continue
        rope.save(8, objects_of(rank))
    for rope in ranks:
        rope.wait(8, Level.COMMITTED)
        rope.close()
    well("export", "latest", str(other), "--socket", nodes[0].socket)
    assert steps_in(other, "test") == [7, 8]


def test_an_export_from_memory_to_a_bucket_and_of_what_is_not_there(bucket, cluster):  # noqa: F811
    nodes = cluster(2)
    assert "no step" in refused("export", "latest", bucket.url, "--socket", nodes[0].socket)
    for rope in save_two_ranks(nodes):
        rope.close()
    assert "no node holds" in refused("export", "8", bucket.url, "--socket", nodes[0].socket)
    assert bucket.files() == {}
    well("export", "7", bucket.url, "--socket", nodes[0].socket)
    assert "all good" in well("verify", bucket.url, "7")


def test_a_job_is_named_and_may_have_ended(tmp_path):
    """Its daemon is found by the job's name. When it has ended, another daemon reads its arena, for the export alone."""
    save = tmp_path / "save.py"
    save.write_text(
        "import subprocess, sys, ropeteam\n"
        "with ropeteam.open() as rope:\n"
        "    for step in (4, 5, 6, 7):\n"
        "        rope.save(step, {'a': b'1' * 100_000}, wait=ropeteam.Level.COMMITTED)\n"
        "subprocess.run(sys.argv[1:], check=True)\n"
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        job = f"ended-{pathlib.Path(shared).name}"

        def ours(*command: str, code: int = 0) -> str:
            done = subprocess.run(
                [str(ROPETEAM), *command], env=environment(ROPETEAM_ARENA_PATH=shared), capture_output=True, text=True,
                timeout=WAIT_S,
            )  # fmt: skip
            assert done.returncode == code, done.stderr
            return done.stderr

        running, ended = tmp_path / "a" / "b", tmp_path / "c" / "d"
        export = [str(ROPETEAM), "export", "latest", str(running), "--job", job]
        ours("run", "--job", job, "--memory", "64M", "--keep-steps", "4", "--", sys.executable, str(save), *export)
        [arena] = pathlib.Path(shared).iterdir()
        told = ours("export", "latest", str(ended), "--job", job)
        assert f"job {job} has ended: reading the arena {arena} that it has left" in told
        assert without_time(snapshot(ended)) == without_time(snapshot(running)) != {}
        assert list(pathlib.Path(shared).iterdir()) == [arena]
        ours("export", "4", str(ended), "--job", job)  # the export before it has released nothing
        told = ours("export", "latest", str(ended), "--job", f"{job}x", code=1)
        assert f"job {job}x neither runs here nor has left an arena in {shared}" in told


def test_an_export_from_memory_never_replaces_another_step(cluster, tmp_path):
    nodes = cluster(1)
    for rope in save_two_ranks(nodes):
        rope.close()
    to = tmp_path / "to"
    to.mkdir()
    well("export", "7", str(to), "--socket", nodes[0].socket)
    [step] = (to / "test").glob("step-*")
    files = [{"rank-00000.safetensors": payload(1, 5000)}, {}]
    incarnation = int(step.name.split("-i")[1])
    (step / MANIFEST).write_bytes(manifest_text("test", 7, incarnation, files))
    before = snapshot(to)
    assert "already, with other contents" in refused("export", "7", str(to), "--socket", nodes[0].socket)
    assert snapshot(to) == before


def test_a_chunk_that_rots_in_memory_is_repaired_before_it_is_exported(cluster, tmp_path):
    nodes = cluster(2)
    for rope in save_two_ranks(nodes):
        rope.close()
    [arena] = nodes[0].arena.iterdir()
    data = arena.read_bytes()
    at = data.index(objects_of(0)["data"][2_000_000:2_000_100])
    with open(arena, "r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    well("export", "7", str(tmp_path), "--socket", nodes[0].socket)
    assert "all good" in well("verify", str(tmp_path), "7")


def exported(cluster, path: pathlib.Path) -> None:
    """Exports what job test has saved to `path`, and ends the job with its memory."""
    path.mkdir()
    nodes = cluster(2)
    for rope in save_two_ranks(nodes):
        rope.close()
    well("export", "7", str(path), "--socket", nodes[0].socket)
    for node in nodes.nodes:
        node.kill(drop_memory=True)


@pytest.mark.parametrize("folder", ["", "/test", "@7", "/test@7"])
def test_an_import_is_restored_by_the_ranks_that_start_next(cluster, tmp_path, folder):
    exported(cluster, tmp_path / "from")
    before = snapshot(tmp_path / "from")
    nodes = cluster(1, job="b")
    done = ask("import", f"{tmp_path}/from{folder}", "--socket", nodes[0].socket)
    assert done.returncode == 0, done.stderr
    assert "step 7: ranks 0 to 1 of 2, 28.6 MiB, are in the memory of job b" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("import step 7: 28.6 MiB of 28.6 MiB, ")
    assert "left" not in done.stderr.splitlines()[-1]
    assert snapshot(tmp_path / "from") == before
    check_two_ranks(nodes)


def test_an_import_is_spread_over_nodes(cluster, tmp_path):
    exported(cluster, tmp_path / "from")
    nodes = cluster(3, job="b")
    parts = [
        subprocess.Popen(
            [str(ROPETEAM), "import", str(tmp_path / "from"), "--ranks", f"{rank}-{rank}"]
            + ["--incarnation-token", "one"]
            + ["--socket", nodes[rank + 1].socket],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, part in enumerate(parts):
        out, err = part.communicate(timeout=WAIT_S)
        assert part.returncode == 0, err
        assert f"ranks {rank} to {rank} of 2" in out
    check_two_ranks(nodes)


def test_an_import_ends_no_world_that_is_open(cluster, tmp_path):
    exported(cluster, tmp_path / "from")
    nodes = cluster(1, job="b")
    with_token = nodes[0].open(0, 1, "training")
    told = refused("import", str(tmp_path / "from"), "--socket", nodes[0].socket)
    assert "job b has 1 ranks open" in told
    told = refused("import", str(tmp_path / "from"), "--incarnation-token", "x", "--socket", nodes[0].socket)
    assert "job b has 1 ranks open" in told
    with_token.save(1, {"a": b"still there"})
    with_token.wait(1, Level.COMMITTED)
    with_token.close()


def test_a_damaged_step_is_not_imported(cluster, tmp_path):
    exported(cluster, tmp_path / "from")
    [step] = (tmp_path / "from" / "test").glob("step-*")
    nodes = cluster(1, job="b")
    flip(step / "rank-00001.safetensors", 1_000_000)
    told = ask("import", str(tmp_path / "from"), "--socket", nodes[0].socket)
    assert told.returncode == 1 and "rank-00001.safetensors has the checksum" in told.stderr
    flip(step / "rank-00001.safetensors", 1_000_000)
    (step / "config.json").unlink()
    assert "lacks config.json" in refused("import", str(tmp_path / "from"), "--socket", nodes[0].socket)
    (step / MANIFEST).unlink()
    assert "no manifest lies in its folder" in refused("import", str(tmp_path / "from"), "--socket", nodes[0].socket)
    rope = nodes[0].open(0, 1, "after")
    assert rope.latest() is None
    rope.close()


def test_an_import_into_too_little_memory(cluster, tmp_path):
    exported(cluster, tmp_path / "from")
    nodes = cluster(1, memory="24M", job="b")
    done = ask("import", str(tmp_path / "from"), "--socket", nodes[0].socket)
    assert done.returncode == 1
    assert "no space" in done.stderr.lower() and "free" in done.stderr
