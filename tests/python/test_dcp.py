# SPDX-License-Identifier: Apache-2.0
"""ropeteam.dcp's staging and failures, and which bytes a load reads. test_dcp_parity.py tests the files'
content."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref

import pytest

torch = pytest.importorskip("torch")

import ropeteam  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from ropeteam import Code  # noqa: E402
from ropeteam.dcp import StorageReader, StorageWriter, _reader, _staging, _writer, latest  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata  # noqa: E402
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
WAIT_S = 10


@pytest.fixture
def rope(fake):
    with ropeteam.open(rank=0, world_size=1) as client:
        yield client


def state(value: float = 1.0):
    return {
        "model": {"w": torch.full((8, 5), value), "b": torch.full((3,), value)},
        "lr": value,
        "list": [1, 2],
    }


def loaded(rope, step):
    into = state(0.0)
    dcp.load(into, storage_reader=StorageReader(rope, step))
    return into


def equal(one, other) -> bool:
    tensors = all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    return tensors and (one["lr"], one["list"]) == (other["lr"], other["list"])


def save_async(rope, step, saved, **options):
    return dcp.async_save(saved, storage_writer=StorageWriter(rope, step), **options)


def learn(rope, step=1):
    """Saves state() once, so that the next asynchronous save of state() is staged in the arena."""
    save_async(rope, step, state()).result()


def error_of(call) -> str:
    """The text of the call's error. The error itself would keep its frames alive, and what is open in
    them."""
    try:
        call()
    except BaseException as error:  # torch's CheckpointException is not an Exception
        return str(error)
    pytest.fail("no error")


def eventually(condition) -> bool:
    """Whether the condition becomes true in time, after a thread has ended. It first collects garbage,
    because torch's error and the frame that raises it refer to each other."""
    gc.collect()
    end = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


class Held(DefaultSavePlanner):
    """In the background thread, makes its plan only after `go` is set."""

    go = threading.Event()

    def create_local_plan(self):
        assert self.go.wait(WAIT_S)
        return super().create_local_plan()


# ---- staging


def test_the_second_save_of_a_structure_is_in_the_arena_when_async_save_returns(rope, fake):
    handles = fake.fake_handles()
    for step, in_arena in ((1, False), (2, True), (3, True)):
        Held.go.clear()
        saved = state(float(step))
        future = save_async(rope, step, saved, planner=Held())
        assert fake.fake_handles() == handles + in_arena
        saved["model"]["w"].zero_()
        saved["list"].append(3)
        Held.go.set()
        future.result()
        known = _staging.memory_of(rope).known
        assert known.prepared is not None and known.hollow is not None, "made with the first save, in the background"
        assert equal(loaded(rope, step), state(float(step)))
    assert fake.fake_handles() == handles


def test_another_structure_is_staged_in_memory_and_learnt(rope, fake):
    learn(rope)
    handles = fake.fake_handles()
    changed = {**state(), "more": torch.ones(4)}
    for step, in_arena in ((2, False), (3, True)):
        Held.go.clear()
        future = save_async(rope, step, changed, planner=Held())
        assert fake.fake_handles() == handles + in_arena
        Held.go.set()
        future.result()


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["model"].update(w=torch.ones(8, 5, dtype=torch.float64)),
        lambda s: s["model"].update(w=torch.ones(8, 6)),
        lambda s: s["model"].update(w=torch.ones(5, 8).t()),
        lambda s: s["model"].update(w=torch.ones(9, 5)[1:]),
        lambda s: s["model"].pop("b"),
        lambda s: s.update(lr=torch.tensor(1.0)),
        lambda s: s.update(lr="text"),
        lambda s: s.update(model={"b": s["model"]["b"], "w": s["model"]["w"]}),
        lambda s: s.update(new=1),
    ],
)
def test_what_a_plan_depends_on_is_in_the_structure(change):
    one, other = state(), state()
    change(other)
    assert _staging.State.of(one).structure() != _staging.State.of(other).structure()
    assert _staging.State.of(one).structure() == _staging.State.of(state(2.0)).structure()


def test_values_of_other_lengths_are_laid_out_again(rope):
    learn(rope)
    for step, text in enumerate(["x", "y" * 1000, "z" * 1000, ""], 2):
        saved = {**state(), "list": [text], "lr": text}
        save_async(rope, step, saved).result()
        into = state(0.0)
        dcp.load(into, storage_reader=StorageReader(rope, step))
        assert (into["lr"], into["list"]) == (text, [text])


def test_nothing_staged_stays_in_memory(rope):
    saved = state()
    watched = [weakref.ref(saved["model"]["w"])]
    stage = _writer.stage_in_memory

    def watch(of):
        staged = stage(of)
        watched.append(weakref.ref(staged["model"]["w"]))
        return staged

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_writer, "stage_in_memory", watch)
        for step in (1, 2, 3):
            save_async(rope, step, saved).result()
    assert len(watched) == 2, "the others went into the arena"
    del saved
    assert eventually(lambda: [each() for each in watched] == [None, None])


def test_other_stagers_and_their_answer(rope):
    stager = DefaultStager(StagingOptions(False, False, True, False))
    response = save_async(rope, 1, state(4.0), async_stager=stager)
    response.staging_completion.result()
    response.upload_completion.result()
    stager.close()
    assert equal(loaded(rope, 1), state(4.0))


# ---- steps


def test_a_step_is_given_once_or_as_checkpoint_id(rope):
    writer = StorageWriter(rope)
    for step in (3, "4", "some/where/5"):
        dcp.save(state(), checkpoint_id=step, storage_writer=writer)
    for step in (6, 7, 8):
        saved = state(float(step))
        dcp.async_save(saved, checkpoint_id=step, storage_writer=writer).result()
    into = state(0.0)
    dcp.load(into, checkpoint_id=7, storage_reader=StorageReader(rope))
    assert equal(into, state(7.0))
    assert equal(loaded(rope, None), state(8.0))
    with pytest.raises(ropeteam.InvalidArgument, match="'last': a step's number"):
        dcp.save(state(), checkpoint_id="last", storage_writer=writer)
    with pytest.raises(BaseException, match="StorageWriter has no step"):
        dcp.save(state(), storage_writer=StorageWriter(rope))


def test_a_state_that_was_staged_for_another_step_is_refused(rope, fake):
    learn(rope)
    handles = fake.fake_handles()
    future = save_async(rope, 2, state(), checkpoint_id=3)
    text = error_of(future.result)
    del future
    assert "staged for step 2, and checkpoint_id is 3" in text
    assert eventually(lambda: fake.fake_handles() == handles)


def test_a_writer_saves_one_step_at_a_time(rope):
    learn(rope)
    Held.go.clear()
    writer = StorageWriter(rope, 2)
    future = dcp.async_save(state(), storage_writer=writer, planner=DefaultSavePlanner())
    future.result()
    staged = StorageWriter(rope, 3)
    staged.stage(state())
    with pytest.raises(ropeteam.InvalidArgument, match="still saves step 3"):
        staged.stage(state())
    staged.close()
    assert writer.stage(state()) is not None, "the one before is over"


def test_latest_is_of_this_door(rope):
    assert latest(rope) is None
    dcp.save(state(), storage_writer=StorageWriter(rope, 5))
    assert latest(rope).step == 5
    rope.save(6, {"model/w": torch.ones(2)})
    assert latest(rope) is None, "there is no storage that could have an older one"
    with pytest.raises(
        BaseException, match=r"step 6 was not saved by torch.distributed.checkpoint: .*'model/w'"
    ):
        loaded(rope, 6)
    with pytest.raises(BaseException, match="no step has been saved by torch.distributed.checkpoint"):
        loaded(rope, None)


def test_a_steps_metadata_go_with_it(rope):
    dcp.save(state(), storage_writer=StorageWriter(rope, 1, metadata={"loss": 0.5}))
    with rope.view(1, 0) as view:
        assert view.metadata == {"loss": 0.5}
        assert view.names() == ["__0_0.distcp", ".metadata"]
    with pytest.raises(TypeError):
        StorageWriter(rope, 2, metadata={"loss": object()})


# ---- failures: the error names the cause, nothing stays open, and the next save is good


@pytest.mark.parametrize("call", ["save_begin", "save_put_parts", "save_commit"])
@pytest.mark.parametrize("way", ["save", "memory", "arena"])
def test_a_call_that_fails_fails_that_save_alone(rope, fake, call, way):
    if way == "arena":
        learn(rope)
    handles = fake.fake_handles()
    fake.fake_fail(call.encode(), int(Code.NO_SPACE))
    if way == "save":
        text = error_of(lambda: dcp.save(state(), storage_writer=StorageWriter(rope, 2)))
    else:
        text = error_of(lambda: save_async(rope, 2, state()).result())
    assert "needed 12 chunks, free 3, limit 64" in text
    assert eventually(lambda: fake.fake_handles() == handles)
    save_async(rope, 3, state(3.0)).result()
    assert equal(loaded(rope, 3), state(3.0))


class Failing(DefaultSavePlanner):
    def __init__(self, call):
        super().__init__()
        self._call = call

    def fail(self, call):
        if call == self._call:
            raise RuntimeError(f"no {call}")

    def set_up_planner(self, *args, **kwargs):
        self.fail("set_up_planner")
        return super().set_up_planner(*args, **kwargs)

    def create_local_plan(self):
        self.fail("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, plans):
        self.fail("create_global_plan")
        return super().create_global_plan(plans)

    def finish_plan(self, plan):
        self.fail("finish_plan")
        return super().finish_plan(plan)


@pytest.mark.parametrize("call", ["set_up_planner", "create_local_plan", "create_global_plan", "finish_plan"])
@pytest.mark.parametrize("way", ["save", "memory", "arena"])
def test_a_planner_that_fails_fails_that_save_alone(rope, fake, call, way):
    if way == "arena":
        learn(rope)
    handles = fake.fake_handles()
    if way == "save":
        text = error_of(
            lambda: dcp.save(state(), storage_writer=StorageWriter(rope, 2), planner=Failing(call))
        )
    else:
        text = error_of(lambda: save_async(rope, 2, state(), planner=Failing(call)).result())
    assert f"no {call}" in text
    assert eventually(lambda: fake.fake_handles() == handles)
    save_async(rope, 3, state(3.0)).result()
    assert equal(loaded(rope, 3), state(3.0))


def test_a_plan_that_was_not_staged_for_is_an_error_once(rope, fake):
    learn(rope)
    handles = fake.fake_handles()
    Held.go.set()
    text = error_of(lambda: save_async(rope, 2, state(), planner=Held()).result())
    assert (
        "step 2: rank 0 staged its state by the plan of its last save" in text and "a Held made it" in text
    )
    assert eventually(lambda: fake.fake_handles() == handles)
    for step in (3, 4):
        save_async(rope, step, state(float(step)), planner=Held()).result()
        assert equal(loaded(rope, step), state(float(step)))


def test_a_save_that_failed_at_another_rank_is_closed_when_dcp_lets_go_of_it(rope, fake):
    """The coordinator's write_data() succeeds, and finish() is never called."""
    handles = fake.fake_handles()
    writer, planner = StorageWriter(rope, 1), DefaultSavePlanner()
    planner.set_up_planner(state(), writer.storage_meta(), True)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    results = writer.write_data(planner.finish_plan(writer.prepare_global_plan(plans)[0]), planner).wait()
    assert fake.fake_handles() == handles + 1
    del results
    assert fake.fake_handles() == handles


# ---- what is gathered


def test_results_that_the_coordinator_knows_are_not_reported_again(rope, tmp_path, monkeypatch):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        reported = []
        report = StorageWriter._report
        monkeypatch.setattr(StorageWriter, "_is_committed", lambda self, step: step != 3)
        monkeypatch.setattr(StorageWriter, "_report", lambda *a: reported.append(report(*a)) or reported[-1])
        for step in range(1, 6):
            dcp.save(state(float(step)), storage_writer=StorageWriter(rope, step))
        assert [len(each) for each in reported] == [4, 1, 1, 4, 1]
        for step in range(1, 6):
            assert equal(loaded(rope, step), state(float(step)))
    finally:
        dist.destroy_process_group()


# ---- what is read


def boxes(rng):
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
    offsets = [rng.randint(0, size - 1) for size in shape]
    return shape, offsets, [rng.randint(1, size - at) for size, at in zip(shape, offsets)]


@pytest.mark.parametrize("seed", range(40))
def test_a_box_is_read_as_ranges_and_nothing_else(rope, monkeypatch, seed):
    rng = random.Random(seed)
    shape, offsets, lengths = boxes(rng)
    whole = torch.randn(shape)
    dcp.save({"t": whole}, storage_writer=StorageWriter(rope, 1))
    reader = StorageReader(rope, 1)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    saved = metadata.state_dict_metadata["t"]
    assert isinstance(saved, TensorStorageMetadata)
    (item,) = create_read_items_for_chunk_list(
        "t", saved, [ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))]
    )
    order = list(range(len(shape)))
    rng.shuffle(order)
    room = [length + rng.randint(0, 2) for length in lengths]
    base = torch.zeros([room[i] for i in order]).permute([order.index(i) for i in range(len(order))])
    target = base[tuple(slice(0, length) for length in lengths)]

    class Planner:
        def resolve_tensor(self, request):
            return target

        def commit_tensor(self, request, tensor):
            assert tensor is not None

    read = []
    read_ranges = ropeteam.View.read_ranges

    def count(view, ranges):
        read.append(sum(each.length * each.count for each in ranges))
        read_ranges(view, ranges)

    monkeypatch.setattr(ropeteam.View, "read_ranges", count)
    reader.read_data(dcp.planner.LoadPlan([item]), Planner())
    assert torch.equal(target, whole[tuple(slice(at, at + length) for at, length in zip(offsets, lengths))])
    assert float(base.abs().sum()) == pytest.approx(float(target.abs().sum())), "nothing beside the target"
    assert read[1] == target.nbytes


def test_a_box_of_too_many_runs_goes_by_the_whole_tensor(rope, monkeypatch):
    monkeypatch.setattr(_reader, "_RANGES_MAX", 2)
    whole = torch.randn(4, 4, 4)
    dcp.save({"t": whole}, storage_writer=StorageWriter(rope, 1))
    into = {"t": torch.zeros(8, 8, 8)[::2, ::2, ::2]}
    dcp.load(into, storage_reader=StorageReader(rope, 1))
    assert torch.equal(into["t"], whole)
