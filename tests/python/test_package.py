# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import array
import ctypes
import gc
import os
import pathlib
import re
import threading
import time

import pytest

import ropeteam
from ropeteam import Range, _native, _values

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = (ROOT / "api" / "include" / "ropeteam" / "ropeteam.h").read_text()


@pytest.fixture
def rope(fake):
    with ropeteam.open(rank=1, world_size=4) as client:
        yield client


# ---- the contract


def test_every_function_of_the_header_is_declared():
    declared = set(re.findall(r"^ROPETEAM_EXPORT [^(]*?(ropeteam_\w+)\(", HEADER, re.MULTILINE))
    assert declared == set(_native._PROTOTYPES)


def test_every_status_of_the_header_has_its_class():
    body = re.search(r"typedef enum \{(.*?)\} ropeteam_status_t", HEADER, re.DOTALL).group(1)
    statuses = {name: int(value) for name, value in re.findall(r"ROPETEAM_(\w+) = (\d+)", body)}
    assert statuses == {code.name: int(code) for code in ropeteam.Code}
    from ropeteam._errors import _BY_CODE

    assert set(_BY_CODE) == set(statuses.values()) - {0}


def test_every_level_of_the_header_is_there():
    body = re.search(r"typedef enum \{([^}]*)\} ropeteam_level_t", HEADER, re.DOTALL).group(1)
    levels = {name: int(value) for name, value in re.findall(r"ROPETEAM_(\w+) = (\d+)", body)}
    assert levels == {level.name: int(level) for level in ropeteam.Level}


def test_structs_are_as_large_as_in_c(tmp_path):
    import subprocess

    structs = {
        "ropeteam_open_options_t": _native.OpenOptions,
        "ropeteam_info_t": _native.InfoStruct,
        "ropeteam_save_options_t": _native.SaveOptions,
        "ropeteam_part_t": _native.Part,
        "ropeteam_step_t": _native.StepStruct,
        "ropeteam_object_t": _native.ObjectStruct,
        "ropeteam_storage_step_t": _native.StorageStepStruct,
        "ropeteam_range_t": _native.RangeStruct,
        "ropeteam_view_options_t": _native.ViewOptions,
    }
    lines = ["#include <ropeteam/ropeteam.h>", "#include <stdio.h>", "int main(void) {"]
    for name, struct in structs.items():
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            lines.append(f'printf("%zu\\n", offsetof({name}, {field}));')
    source = tmp_path / "sizes.c"
    source.write_text("\n".join([*lines, "return 0; }"]))
    compiler = os.environ.get("CC", "cc")
    include = f"-I{ROOT / 'api' / 'include'}"
    subprocess.run([compiler, include, str(source), "-o", str(tmp_path / "sizes")], check=True)
    sizes = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout.split()
    expected = []
    for struct in structs.values():
        expected.append(ctypes.sizeof(struct))
        expected += [getattr(struct, field).offset for field, *_ in struct._fields_]
    assert [int(size) for size in sizes] == expected


def test_the_pinned_library_is_the_only_one_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(_native, "_loaded", None)
    monkeypatch.setenv("ROPETEAM_LIBRARY", str(tmp_path / "missing.so"))
    with pytest.raises(ropeteam.Unsupported, match=r"missing\.so"):
        ropeteam.library_version()


def test_a_library_that_is_another_is_refused(monkeypatch):
    monkeypatch.setattr(_native, "_loaded", None)
    monkeypatch.setenv("ROPETEAM_LIBRARY", "libc.so.6")
    with pytest.raises(ropeteam.Unsupported, match="no ropeteam_version"):
        ropeteam.library_version()


# ---- open


def test_options_reach_the_library(fake):
    with ropeteam.open("/tmp/the.sock", rank=2, world_size=5, incarnation_token="t1", timeout=1.5) as client:
        assert client.info() == ropeteam.Info(2, 5, 3, 4096, 1 << 40)
        assert client.rank == 2
    assert (fake.fake_socket(), fake.fake_token(), fake.fake_timeout()) == (b"/tmp/the.sock", b"t1", 1500)


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, (0, 1)),  # no launcher: the only rank
        ({"SLURM_NTASKS": "8"}, (0, 1)),  # a shell of an allocation
        ({"SLURM_STEP_NUM_TASKS": "1"}, (0, 1)),
        ({"SLURM_STEP_NUM_TASKS": "2"}, (7, 8)),  # one of several, and the library says that RANK is missing
        ({"RANK": "3"}, (7, 8)),
        ({"WORLD_SIZE": "3"}, (7, 8)),
    ],
)
def test_rank_and_world_default_to_the_library_s_reading_of_the_environment(
    fake, monkeypatch, variables, expected
):
    for name in ("RANK", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with ropeteam.open(timeout=0) as client:
        assert (client.rank, client.info().world_size) == expected
    assert fake.fake_timeout() == 1  # 0 would mean the default of 30 s


@pytest.mark.parametrize(
    "options",
    [
        {"rank": -1},
        {"rank": 1 << 32},
        {"rank": 0xFFFFFFFF},
        {"world_size": 0},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"incarnation_token": "a\0b"},
    ],
)
def test_options_that_c_would_cut_off_are_refused(fake, options):
    with pytest.raises(ropeteam.InvalidArgument):
        ropeteam.open(**options)
    assert fake.fake_handles() == 0


@pytest.mark.parametrize("code", [code for code in ropeteam.Code if code])
def test_each_status_raises_its_class_with_the_library_s_sentence(fake, code):
    fake.fake_fail(b"open", int(code))
    with pytest.raises(ropeteam.RopeteamError, match="needed 12 chunks, free 3") as raised:
        ropeteam.open()
    assert raised.value.code == code
    assert type(raised.value) is not ropeteam.RopeteamError


def test_a_status_of_a_newer_library_is_a_ropeteam_error(fake):
    fake.fake_fail(b"open", 77)
    with pytest.raises(ropeteam.RopeteamError) as raised:
        ropeteam.open()
    assert (type(raised.value), raised.value.code) == (ropeteam.RopeteamError, 77)


def test_errors_are_what_python_programs_catch():
    assert issubclass(ropeteam.DeadlineExceeded, TimeoutError)
    assert issubclass(ropeteam.InvalidArgument, ValueError)
    assert issubclass(ropeteam.NotFound, LookupError)


# ---- save and load


def test_bytes_buffers_and_json_come_back(rope):
    state = {"epoch": 3, "position": [1, 2], "lr": 0.1, "none": None, "flag": True, "text": "é"}
    rope.save(
        5,
        {
            "bytes": b"abc",
            "bytearray": bytearray(b"defg"),
            "view": memoryview(b"hijkl")[1:3],
            "array": array.array("d", [1.5, 2.5]),
            "empty": b"",
            "state": state,
        },
    )
    shard = rope.load()
    assert (shard.step, shard.rank) == (5, 1)
    assert dict(shard) == {
        "bytes": b"abc",
        "bytearray": b"defg",
        "view": b"ij",
        "array": array.array("d", [1.5, 2.5]).tobytes(),
        "empty": b"",
        "state": state,
    }


def test_floats_in_json_come_back_to_the_bit(rope):
    values = [0.1, 1e-320, -0.0, float("inf"), 2**63 + 1]
    rope.save(1, {"v": values})
    assert [repr(v) for v in rope.load()["v"]] == [repr(v) for v in values]


def test_what_is_reserved_is_exactly_what_is_put(rope, fake):
    rope.save(1, {"a": b"12345", "b": {"x": 1}})
    with rope.view(1) as view:
        lengths = [view._objects[name] for name in view._objects]
    assert _values.INDEX_NAME in view._objects
    assert (fake.fake_begun_bytes(), fake.fake_begun_objects()) == (sum(lengths), len(lengths))


def test_an_agreement_goes_along_with_the_save(rope, fake):
    rope.save(1, {"a": b"1"}, agreement=2**64 - 1)
    assert fake.fake_begun_agreement() == 2**64 - 1
    rope.save(2, {"a": b"1"})
    assert fake.fake_begun_agreement() == 0
    with pytest.raises(ropeteam.InvalidArgument, match="agreement -1"):
        rope.begin(3, agreement=-1)


def test_parts_become_one_object_of_bytes(rope):
    with rope.begin(1) as save:
        save.put_parts("file.distcp", [b"head", bytearray(), memoryview(b"0123")[1:3], b""])
        save.put_parts("nothing", [])
    with rope.view(1) as view:
        assert view.info("file.distcp") == ropeteam.ObjectInfo(kind="bytes", length=6)
        assert view.value("file.distcp") == b"head12"
        assert view.value("nothing") == b""
        assert view.names() == ["file.distcp", "nothing"]


def test_bytes_are_appended_to_what_was_put_last(rope):
    with rope.begin(1) as save:
        with pytest.raises(ropeteam.InvalidArgument, match="None"):
            save.append(b"x")
        save.put("grows", b"a")
        save.append(memoryview(b"0bc")[1:])
        with pytest.raises(ropeteam.InvalidArgument, match="a dict to 'grows'"):
            save.append({"no": "buffer"})
        save.append(b"")
        save.put("value", 1)
        with pytest.raises(ropeteam.InvalidArgument, match="'value'"):
            save.append(b"2")
    assert rope.load(1) == {"grows": b"abc", "value": 1}


def test_a_part_that_is_no_memory_leaves_the_save_as_it_was(rope):
    with rope.begin(1) as save:
        with pytest.raises(TypeError, match="part 1 of x is a str: a tensor or a buffer is needed"):
            save.put_parts("x", [b"a", "b"])
        with pytest.raises(TypeError, match="part 1 of x: a set"):
            save.put_parts("x", [b"a", {1}])
        save.put_parts("x", [b"a"])
    assert rope.load(1) == {"x": b"a"}


def test_a_step_s_metadata_come_back_and_are_no_object_of_the_shard(rope, fake):
    metadata = {"loss": float("nan"), "best": [0.25, float("-inf")], "revision": "é", "tokens": 2**63 + 1}
    rope.save(1, {"a": b"12345"}, metadata=metadata)
    with rope.view(1) as view:
        assert view.names() == ["a"] and list(rope.load(1)) == ["a"]
        read = {"loss": None, "best": [0.25, None], "revision": "é", "tokens": 2**63 + 1}
        assert view.metadata == read
        lengths = list(view._objects.values())
    assert (fake.fake_begun_bytes(), fake.fake_begun_objects()) == (sum(lengths), len(lengths))
    with rope.begin(2) as save:
        save.put_metadata({"loss": 1})
    rope.save(3, {"a": b"1"})
    assert rope.view(2).metadata == {"loss": 1}
    assert rope.view(3).metadata == {}


@pytest.mark.parametrize("metadata", [[1], "loss", {1: 2}, {"loss": b"1"}, {"a": object()}])
def test_metadata_that_are_not_json_are_a_type_error_before_anything_is_saved(rope, fake, metadata):
    before = fake.fake_handles()
    with pytest.raises(TypeError, match="metadata"):
        rope.save(1, {"a": b"1"}, metadata=metadata)
    assert fake.fake_handles() == before
    assert rope.latest() is None


@pytest.mark.parametrize("metadata", [b"", b"[1]", b"\xff", b"{"])
def test_metadata_of_another_program_that_are_not_a_json_object_are_corrupt(rope, metadata):
    with rope.begin(1) as save:
        save._put(_values.METADATA_NAME, metadata)
    with pytest.raises(ropeteam.Corrupt, match="not a JSON object"):
        rope.view(1).metadata


def test_a_shard_of_bytes_alone_has_no_index_object(rope):
    rope.save(1, {"a": b"1"})
    with rope.view(1) as view:
        assert list(view._objects) == ["a"]


@pytest.mark.parametrize("value", [object(), {1: 2}, {"k": {2: 3}}, {"k": b"bytes"}, {1, 2}])
def test_what_cannot_be_saved_is_a_type_error_before_anything_is_saved(rope, fake, value):
    before = fake.fake_handles()
    with pytest.raises(TypeError, match="bad"):
        rope.save(1, {"good": b"1", "bad": value})
    assert fake.fake_handles() == before
    assert rope.latest() is None


@pytest.mark.parametrize("objects", [None, [b"1"], b"1", 60])
def test_what_is_no_mapping_is_a_type_error_that_names_what_is(rope, objects):
    with pytest.raises(TypeError, match="a mapping of names to tensors, buffers or JSON values is needed"):
        rope.save(60, objects)
    assert rope.latest() is None


def test_a_buffer_with_gaps_is_refused(rope):
    with pytest.raises(ropeteam.InvalidArgument, match="not contiguous"):
        rope.save(1, {"gaps": memoryview(b"abcdef")[::2]})


@pytest.mark.parametrize("name", ["", "x" * 256, "a\0b", ".ropeteam/index", "ropeteam.metadata", 5])
def test_bad_names_are_refused_and_the_save_is_aborted(rope, fake, name):
    before = fake.fake_handles()
    with pytest.raises(ropeteam.InvalidArgument):
        rope.save(1, {name: b"1"})
    assert fake.fake_handles() == before
    assert rope.latest() is None


@pytest.mark.parametrize("step", [-1, 1 << 64, 1.0, True, None])
def test_bad_steps_are_refused(rope, step):
    with pytest.raises(ropeteam.InvalidArgument):
        rope.save(step, {"a": b"1"})


def test_a_failed_put_aborts_the_save_and_keeps_the_error(rope, fake):
    before = fake.fake_handles()
    fake.fake_fail(b"save_put_parts", int(ropeteam.Code.NO_SPACE))
    with pytest.raises(ropeteam.NoSpace, match="limit 64"):
        rope.save(1, {"a": b"1"})
    assert fake.fake_handles() == before
    assert rope.latest() is None


def test_a_save_block_that_raises_is_not_committed(rope, fake):
    before = fake.fake_handles()
    with pytest.raises(RuntimeError, match="training"):
        with rope.begin(1) as save:
            save.put("a", b"1")
            raise RuntimeError("training failed")
    assert rope.latest() is None
    del save
    assert fake.fake_handles() == before


def test_a_save_may_be_committed_or_aborted_inside_its_block(rope):
    with rope.begin(1) as save:
        save.put("a", b"1")
        save.commit()
        assert save.closed
    with rope.begin(2) as save:
        save.abort()
    with pytest.raises(ropeteam.InvalidArgument, match="over"):
        save.put("b", b"")
    with pytest.raises(ropeteam.InvalidArgument, match="over"):
        save.commit()
    assert rope.latest().step == 1


def test_reserved_memory_is_filled_in_place_and_released_at_the_commit(rope):
    with rope.begin(1, bytes=8, objects=2) as save:
        memory = save.reserve("r", 8)
        memory[:] = b"abcdefgh"
        assert len(save.reserve("none", 0)) == 0
    with pytest.raises(ValueError, match="released"):
        memory[0] = 1
    assert rope.load()["r"] == b"abcdefgh"


def test_wait_follows_a_save_when_asked(rope, fake):
    fake.fake_fail(b"wait", int(ropeteam.Code.ABORTED))
    with pytest.raises(ropeteam.Aborted):
        rope.save(1, {"a": b"1"}, wait=ropeteam.Level.REPLICATED)
    assert rope.latest().step == 1  # it is saved nevertheless
    rope.wait(1, ropeteam.Level.LOCAL)


def test_a_step_is_asked_for_when_its_save_says_so(rope, fake):
    rope.save(1, {"a": b"1"})
    with pytest.raises(ropeteam.Unsupported, match="no storage"):
        rope.save(2, {"a": b"1"}, persist=True)
    assert rope.latest().step == 2  # it is saved nevertheless
    fake.fake_fail(b"persist", int(ropeteam.Code.ABORTED))
    with pytest.raises(ropeteam.Aborted):
        rope.persist(1)


def test_a_dropped_step_is_gone(rope, fake):
    for step in (1, 2):
        rope.save(step, {"a": b"1"})
    rope.drop(1)
    with pytest.raises(ropeteam.NotFound):
        rope.load(1)
    with pytest.raises(ropeteam.NotFound, match="no node"):
        rope.drop(1)
    fake.fake_fail(b"drop", int(ropeteam.Code.INVALID_ARGUMENT))
    with pytest.raises(ropeteam.InvalidArgument):
        rope.drop(2)
    assert rope.latest().step == 2
    with pytest.raises(ropeteam.InvalidArgument, match="step"):
        rope.drop(-1)


def test_a_policy_says_something(rope):
    for nothing in ({}, {"persist_every": 0}, {"persist_every": 7, "keep_on_storage": 0}):
        with pytest.raises(ropeteam.InvalidArgument, match="one is needed, from 1 on"):
            rope.set_policy(**nothing)
    with pytest.raises(ropeteam.InvalidArgument, match="--keep-on-storage 2"):
        rope.set_policy(keep_on_storage=3)
    with pytest.raises(ropeteam.InvalidArgument, match="--persist-every 2"):
        rope.set_policy(persist_every=3, timeout=1)
    with pytest.raises(ropeteam.Unsupported, match="no storage"):
        rope.set_policy(keep_on_storage=5)


def test_steps_on_storage_are_listed(rope, fake):
    before = fake.fake_handles()
    good = ropeteam.StoredStep(20, 3, "step-20", "", {"loss": 0.25}, 1800000000, 12345, 4)
    bad = ropeteam.StoredStep(10, 3, "step-10", "it lacks a file", {}, 0, 0, 0)
    assert rope.storage_steps() == [good, bad]
    assert rope.storage_steps(limit=1) == [good]
    gc.collect()
    assert fake.fake_handles() == before
    for limit in (0, -1, 1 << 32, None):
        with pytest.raises(ropeteam.InvalidArgument, match="limit"):
            rope.storage_steps(limit)
    fake.fake_fail(b"storage_list", int(ropeteam.Code.UNSUPPORTED))
    with pytest.raises(ropeteam.Unsupported):
        rope.storage_steps()


@pytest.fixture
def program(fake, tmp_path, monkeypatch):
    """write(status, said) puts a `ropeteam` on PATH that notes its arguments, prints `said` and exits with
    `status`."""

    def write(status: int, said: str) -> pathlib.Path:
        path = tmp_path / "bin" / "ropeteam"
        path.parent.mkdir(exist_ok=True)
        noted = tmp_path / "arguments"
        path.write_text(f"""#!/bin/sh\nprintf '%s\\n' "$@" > {noted}\necho '{said}' >&2\nexit {status}\n""")
        path.chmod(0o755)
        return noted

    monkeypatch.setattr("sys.executable", str(tmp_path / "no" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return write


def test_export_runs_the_program(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    noted = program(0, "")
    ropeteam.export(7, "-out", storage="s3://bucket/runs", job="train")
    expected = ["export", "7", str(tmp_path / "-out"), "--storage", "s3://bucket/runs", "--job", "train"]
    assert noted.read_text().splitlines() == expected
    ropeteam.export(7, tmp_path, socket="r.sock")
    expected = ["export", "7", str(tmp_path), "--socket", str(tmp_path / "r.sock")]
    assert noted.read_text().splitlines() == expected
    ropeteam.export("step-0000000007-i00000001", tmp_path, storage=tmp_path / "store")
    expected = ["export", "step-0000000007-i00000001", str(tmp_path), "--storage", str(tmp_path / "store")]
    assert noted.read_text().splitlines() == expected
    ropeteam.export(7, tmp_path, format="hf", model="actor", config="conf", max_shard_size="1GB")
    expected = ["export", "7", str(tmp_path), "--format", "hf", "--model", "actor", "--config"]
    expected += [str(tmp_path / "conf"), "--max-shard-size", "1GB"]
    assert noted.read_text().splitlines() == expected


def test_what_the_program_says_is_raised(program):
    program(1, "plain progress\nropeteam export: not found: there is no step 7")
    with pytest.raises(ropeteam.NotFound, match="^there is no step 7$"):
        ropeteam.export(7, "/tmp", storage="/store")
    program(2, "ropeteam export: unknown option --frob (ropeteam export --help)")
    with pytest.raises(ropeteam.InvalidArgument, match="unknown option"):
        ropeteam.export(7, "/tmp")
    program(139, "")
    with pytest.raises(ropeteam.InternalError, match="ended with 139"):
        ropeteam.export(7, "/tmp")


def test_an_export_that_takes_too_long_is_stopped(program, tmp_path):
    program(0, "")
    (tmp_path / "bin" / "ropeteam").write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ropeteam.DeadlineExceeded, match="step 7 was not exported"):
        ropeteam.export(7, "/tmp", timeout=0.1)


def test_without_the_program_it_is_said_so(fake, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ropeteam.Unsupported, match="ropeteam is not found"):
        ropeteam.export(7, "/tmp")


def test_latest_takes_a_level(rope):
    rope.save(1, {"a": b"1"})
    assert rope.latest(level=ropeteam.Level.COMMITTED) == rope.latest()
    with pytest.raises(ropeteam.Unsupported, match="no storage"):
        rope.latest(level=ropeteam.Level.PERSISTED)
    with pytest.raises(ValueError):
        rope.latest(level=7)


def test_other_threads_run_while_wait_waits(rope):
    # If the call held the interpreter lock, the counter would not change until the wait is over.
    waiting, counted = threading.Event(), 0
    outcome = []

    def wait():
        waiting.set()
        try:
            rope.wait(9, ropeteam.Level.COMMITTED, timeout=0.5)
        except ropeteam.DeadlineExceeded as error:
            outcome.append(str(error))

    thread = threading.Thread(target=wait)
    begin = time.monotonic()
    thread.start()
    waiting.wait()
    while thread.is_alive() and time.monotonic() < begin + 10:
        counted += 1
        time.sleep(0.001)
    thread.join()
    assert outcome == ["not yet"]
    assert counted > 50


def test_latest_is_none_when_nothing_was_saved_and_load_says_so(rope):
    assert rope.latest() is None
    with pytest.raises(ropeteam.NotFound, match="no step"):
        rope.load()


# ---- views


def test_a_view_reads_parts_and_refuses_ranges_outside(rope):
    rope.save(1, {"a": b"0123456789", "b": b""})
    with rope.view(1) as view:
        assert (view.names(), list(view), len(view)) == (["a", "b"], ["a", "b"], 2)
        assert "a" in view and "c" not in view
        assert (view.length("a"), view.read("a", 2, 3), view.read("a", 8), view.read("b")) == (
            10,
            b"234",
            b"89",
            b"",
        )
        target = bytearray(4)
        view.read_into("a", target, offset=1)
        assert target == b"1234"
        with pytest.raises(ropeteam.InvalidArgument):
            view.read("a", 11)
        with pytest.raises(ropeteam.InvalidArgument):
            view.read("a", -1)
        with pytest.raises(ropeteam.InvalidArgument):
            view.read("a", 5, 6)
        with pytest.raises(ropeteam.InvalidArgument, match="writable"):
            view.read_into("a", b"0000")
        with pytest.raises(ropeteam.NotFound):
            view.read("c")
    with pytest.raises(ropeteam.InvalidArgument, match="closed"):
        view.read("a")


def test_ranges_are_read_in_one_call_and_checked_against_their_targets(rope):
    rope.save(1, {"a": bytes(range(100)), "b": b"xyz"}, wait=None)
    with rope.view(1) as view:
        columns, rest = bytearray(b"#" * 12), array.array("i", [-1, -1])
        view.read_ranges(
            [
                Range("a", columns, offset=3, length=2, count=4, stride=10, target_offset=1, target_stride=3),
                Range("b", rest, 1, 2, target_offset=4),
                Range("a", rest, 0, 1, count=0),
            ]
        )
        assert columns == b"#\x03\x04#\x0d\x0e#\x17\x18#\x21\x22"
        assert rest.tobytes() == b"\xff\xff\xff\xffyz\xff\xff"
        view.read_ranges([])
        too_far = Range("a", columns, 0, 2, count=5, stride=10, target_offset=0, target_stride=3)
        with pytest.raises(ropeteam.InvalidArgument, match="ends at byte 14 of its target, which has 12"):
            view.read_ranges([Range("b", rest, 0, 3), too_far])
        with pytest.raises(ropeteam.InvalidArgument, match="offset -1"):
            view.read_ranges([Range("a", columns, -1, 2)])
        with pytest.raises(ropeteam.NotFound):
            view.read_ranges([Range("b", rest, 0, 3), Range("c", rest, 0, 3)])
        assert rest.tobytes() == b"\xff\xff\xff\xffyz\xff\xff"  # nothing was read


def test_a_map_is_read_only_and_outlives_its_view_and_client(fake):
    before = fake.fake_handles()
    client = ropeteam.open()
    client.save(1, {"a": b"0123", "empty": b""})
    with client.view(1) as view:
        memory = view.map("a")
        assert view.map("empty") == b""
        assert memory.readonly and memory == b"0123"
    client.close()
    del view
    assert memory[2:] == b"23"
    assert fake.fake_handles() == before + 2  # view and client live as long as something refers to the memory
    memory.release()
    del memory, client
    gc.collect()
    assert fake.fake_handles() == before


def test_load_checks_every_target_before_it_reads(rope):
    rope.save(1, {"a": b"1234", "j": {"x": 1}})
    good, bad = bytearray(4), bytearray(3)
    for into in ({"a": bad}, {"a": good, "missing": bad}, {"a": good, "j": bad}):
        with pytest.raises((ropeteam.InvalidArgument, ropeteam.NotFound)):
            rope.load(into=into)
        assert good == bytes(4)
    shard = rope.load(into={"a": good}, names=[])
    assert good == b"1234" and shard["a"] is good and list(shard) == ["a"]


def test_a_corrupt_index_is_named(rope):
    with rope.begin(1) as save:
        save._put(_values.INDEX_NAME, b"not json")
        save.put("a", b"1")
    with pytest.raises(ropeteam.Corrupt, match="index"):
        rope.load()
    with rope.view(1) as view:
        assert view.read("a") == b"1"  # bytes can be read without the index


def test_an_index_of_another_version_is_refused(rope):
    with rope.begin(1) as save:
        save._put(_values.INDEX_NAME, b'{"version": 9, "objects": {}}')
        save.put("a", b"1")
    with pytest.raises(ropeteam.Unsupported, match="version 9"):
        rope.load()


# ---- closing


def test_closing_the_client_closes_what_it_opened(fake):
    before = fake.fake_handles()
    client = ropeteam.open()
    client.save(1, {"a": b"1"})
    save, view = client.begin(2), client.view(1)
    client.close()
    client.close()
    assert save.closed and view.closed and client.closed
    gc.collect()
    assert fake.fake_handles() == before
    with pytest.raises(ropeteam.InvalidArgument, match="closed"):
        client.latest()


def test_a_forked_child_is_refused_and_does_not_close_the_parent_s_handle(rope, fake):
    before = fake.fake_handles()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            rope.latest()
        except ropeteam.InvalidArgument:
            handle, rope._handle = rope._handle, None
            del handle
            status = 0 if fake.fake_handles() == before else 2
        os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_closing_in_one_thread_leaves_a_waiting_one_its_handle(fake):
    before = fake.fake_handles()
    client = ropeteam.open()
    waiting, outcome = threading.Event(), []

    def wait():
        handle = client._use()
        waiting.set()
        try:
            client.wait(1, timeout=0.3) if handle else None
        except ropeteam.RopeteamError as error:
            outcome.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    client.close()
    thread.join()
    assert outcome and outcome[0] in (ropeteam.DeadlineExceeded, ropeteam.InvalidArgument)
    assert fake.fake_handles() == before
