# SPDX-License-Identifier: Apache-2.0
"""Checkpointer over the fake library: saves that can never succeed raise, and when."""

from __future__ import annotations

import signal
import threading

import pytest

import ropeteam
from ropeteam import Code

torch = pytest.importorskip("torch", reason="torch is not installed")
import ropeteam.torch as rt  # noqa: E402


@pytest.fixture
def rope(fake):
    with ropeteam.open(rank=0, world_size=1) as client:
        yield client


def _with(buffer):
    model = torch.nn.Linear(1, 1)
    model.register_buffer("bad", buffer)
    return model


def _fake_tensor():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.parametrize(
    "make, metadata, says",
    [
        (lambda: torch.ones(1), {"loss": torch.ones(2)}, r"metadata: loss is a Tensor of shape \(2,\)"),
        (lambda: torch.ones(1), {"a": [object()]}, "metadata: .*not JSON serializable"),
        (
            lambda: torch.ones(1, device="meta"),
            None,
            "model/bad: a tensor on the meta device has .* no bytes",
        ),
        (_fake_tensor, None, "model/bad: a fake tensor of torch.compile"),
        (
            lambda: torch.nested.as_nested_tensor([torch.ones(1)]),
            None,
            "model/bad: a nested tensor is several",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
            None,
            "model/bad: a nested tensor is several",
        ),
    ],
)
def test_what_can_never_be_saved_raises_at_the_first_save(rope, caplog, make, metadata, says):
    model = _with(make())
    ckpt = rt.Checkpointer(model=model, client=rope)
    with pytest.raises(TypeError, match=says):
        ckpt.step(0, metadata=metadata)
    model.bad = torch.ones(1)
    assert ckpt.step(1)
    # From now on training would lose what it has done since.
    model.bad = make()
    assert ckpt.step(2, metadata=metadata) is False
    assert caplog.text.count("step 2 is not safe, training goes on") == 1 and ckpt.stats.failed == 2


def test_numbers_of_torch_and_numpy_are_metadata(rope):
    import numpy

    loss = {
        "a": torch.tensor(0.25),
        "b": numpy.float32(0.5),
        "c": [numpy.int64(3)],
        "d": torch.tensor(float("nan")),
    }
    assert rt.Checkpointer(model=torch.nn.Linear(1, 1), client=rope).step(0, metadata=loss)
    assert rope.view(0).metadata == {"a": 0.25, "b": 0.5, "c": [3], "d": None}


def test_a_shard_that_cannot_fit_raises_at_the_first_save(fake, rope):
    fake.fake_fail(b"save_begin", Code.INVALID_ARGUMENT)
    with pytest.raises(ropeteam.InvalidArgument, match="needed 12 chunks"):
        rt.Checkpointer(model=torch.nn.Linear(1, 1), client=rope).step(0)


def test_numbers_that_begin_again_in_each_epoch_raise(fake, rope, caplog):
    ckpt = rt.Checkpointer(model=torch.nn.Linear(1, 1), client=rope)
    assert ckpt.step(0) and ckpt.step(1)
    fake.fake_fail(b"save_begin", Code.ALREADY_EXISTS)
    assert ckpt.step(1) is False  # a loop may save its last step once more
    fake.fake_fail(b"save_begin", Code.INVALID_ARGUMENT)
    with pytest.raises(ropeteam.InvalidArgument):
        ckpt.step(0)
    fake.fake_fail(b"save_begin", Code.INVALID_ARGUMENT)
    assert ckpt.step(2) is False  # any other mistake stops nothing
    assert ckpt.step(3)


def test_two_threads_at_once_are_told_so(rope):
    ckpt = rt.Checkpointer(model=torch.nn.Linear(1, 1), extra={"at": 0}, client=rope)
    refused = []

    def save():
        with pytest.raises(ropeteam.InvalidArgument, match="two threads use this Checkpointer at once") as error:
            ckpt.save(2)
        refused.append(error)

    class DuringTheSave:
        def state_dict(self):
            thread = threading.Thread(target=save)
            thread.start()
            thread.join()
            return {}

        def load_state_dict(self, state):
            pass

    ckpt._others["scheduler"] = DuringTheSave()
    assert ckpt.step(1) and len(refused) == 1
    assert ckpt.stats.saved == 1


def test_a_signal_handler_may_save_in_the_middle_of_a_save(rope):
    ckpt = rt.Checkpointer(model=torch.nn.Linear(1, 1), extra={"at": 0}, client=rope)
    saved = []

    class Interrupted:
        def state_dict(self):
            if not saved:
                saved.append(None)
                signal.raise_signal(signal.SIGUSR1)
            return {}

        def load_state_dict(self, state):
            pass

    ckpt._others["scheduler"] = Interrupted()
    former = signal.signal(signal.SIGUSR1, lambda *_: saved.append(ckpt.save(2)))
    try:
        ckpt.step(1)
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert saved == [None, True]
