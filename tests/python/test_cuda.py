# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors on a machine without CUDA: tensors in CPU memory that claim to be on a device, with torch's streams
replaced. The tests check what the library receives (address, length, stream), and how long the tensor lives."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import ropeteam  # noqa: E402

torch_device = torch.device


class OnDevice(torch.Tensor):
    """A tensor of CPU bytes that claims to be on cuda:0."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data)

    @property
    def device(self):
        return torch_device("cuda", 0)

    def detach(self):
        return self

    def contiguous(self):
        plain = self.as_subclass(torch.Tensor).contiguous()
        return self if plain.data_ptr() == self.data_ptr() else OnDevice(plain)

    def resolve_conj(self):
        return self

    def resolve_neg(self):
        return self


class Stream:
    def __init__(self, handle):
        self.cuda_stream = handle
        self.waits = 0

    def synchronize(self):
        self.waits += 1


@pytest.fixture
def stream(monkeypatch):
    made = Stream(7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: made)
    return made


@pytest.fixture
def client(fake):
    with ropeteam.open("socket", rank=0, world_size=1) as opened:
        yield opened


def test_a_save_hands_device_pointers_and_the_stream_over(fake, client, stream):
    tensor = OnDevice(torch.arange(10, dtype=torch.float32))
    client.save(1, {"w": tensor, "host": torch.ones(3), "empty": OnDevice(torch.zeros(0))})
    assert fake.fake_cuda_calls() == 1
    assert stream.waits == 0
    assert torch.equal(client.load(1)["w"], torch.arange(10, dtype=torch.float32))


def test_a_put_that_is_the_callers_again_waits_for_the_stream(fake, client, stream):
    with client.begin(1) as save:
        save.put("w", OnDevice(torch.ones(4)))
        assert (fake.fake_cuda_calls(), stream.waits) == (0, 1)
        save.put("v", OnDevice(torch.ones(4)), background=True)
        assert (fake.fake_cuda_calls(), stream.waits) == (1, 1)


def test_a_tensor_in_the_background_lives_until_the_commit(client, stream):
    save = client.begin(1)
    tensor = OnDevice(torch.ones(4))
    seen = weakref.ref(tensor)
    save.put("w", tensor, background=True)
    del tensor
    gc.collect()
    assert seen() is not None
    save.commit()
    del save
    gc.collect()
    assert seen() is None


def test_parts_on_devices_and_in_the_background(fake, client, stream):
    with client.begin(1) as save:
        turned = OnDevice(torch.arange(6, dtype=torch.int32).reshape(2, 3).t())
        device = OnDevice(torch.arange(4, dtype=torch.uint8))
        seen = weakref.ref(device)
        save.put_parts("x", [b"head", device, turned], background=True)
        assert (fake.fake_cuda_calls(), stream.waits) == (1, 1)
        save.put_parts("y", [b"head", device])
        assert (fake.fake_cuda_calls(), stream.waits) == (1, 2)
        del device
        gc.collect()
        assert seen() is not None
    gc.collect()
    assert seen() is None
    turned_bytes = torch.arange(6, dtype=torch.int32).reshape(2, 3).t().contiguous().numpy().tobytes()
    assert client.load(1) == {"x": b"head" + bytes(range(4)) + turned_bytes, "y": b"head" + bytes(range(4))}


def test_a_copy_made_for_the_save_does_not_stay_on_the_device(fake, client, stream):
    tensor = OnDevice(torch.arange(6, dtype=torch.int32).reshape(2, 3).t())
    client.save(1, {"w": tensor})
    assert (fake.fake_cuda_calls(), stream.waits) == (0, 1)
    assert torch.equal(client.load(1)["w"], torch.arange(6, dtype=torch.int32).reshape(2, 3).t())


def test_a_load_fills_device_tensors_in_place(fake, client, stream):
    client.save(1, {"w": torch.arange(10)})
    target = OnDevice(torch.zeros(10, dtype=torch.int64))
    client.load(1, into={"w": target})
    assert fake.fake_cuda_calls() == 1
    assert target.as_subclass(torch.Tensor).tolist() == list(range(10))


def test_other_devices_are_refused(client):
    with pytest.raises(ropeteam.Unsupported, match="on the meta device has a shape and no bytes"):
        client.save(1, {"w": torch.ones(3, device="meta")})


def test_ranges_wait_for_a_device_targets_stream_once(client, stream):
    client.save(1, {"w": torch.arange(10, dtype=torch.uint8)})
    target = OnDevice(torch.zeros(4, dtype=torch.uint8))
    with client.view(1) as view:
        end = ropeteam.Range("w", target, 8, 2, target_offset=2)
        view.read_ranges([ropeteam.Range("w", target, 0, 2), end])
    assert stream.waits == 1
    assert target.as_subclass(torch.Tensor).tolist() == [0, 1, 8, 9]
