# SPDX-License-Identifier: Apache-2.0
"""The decorators, used as in SkyPilot's guide, over the fake library."""

from __future__ import annotations

import pytest

import ropeteam
from ropeteam import Code

torch = pytest.importorskip("torch", reason="torch is not installed")
from ropeteam import skypilot  # noqa: E402


@pytest.fixture
def folder(fake, monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    skypilot._store.cache_clear()
    yield tmp_path / "checkpoints"
    skypilot._store().close()
    skypilot._store.cache_clear()


def functions(folder, prefix="checkpoint", **options):
    @skypilot.save_checkpoint(save_dir=str(folder), checkpoint_prefix=prefix, **options)
    def save(step, model, optimizer):
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"model_{step}.pt"
        )
        (folder / "latest").write_text(str(step))
        return "saved"

    @skypilot.load_checkpoint(save_dir=str(folder), checkpoint_prefix=prefix)
    def load(step, model, optimizer):
        state = torch.load(folder / f"model_{step}.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        assert (folder / "latest").read_text() == str(step)
        return step

    return save, load


def training():
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters())


def forget(folder):
    """Removes the folder's files, as on a machine that replaces a lost one."""
    for path in folder.iterdir():
        path.unlink()


def test_a_new_machine_goes_on_from_the_newest_step(folder):
    save, load = functions(folder, metadata={"run": "bert"})
    model, optimizer = training()
    assert load(0, model, optimizer) is None
    for step in range(3):
        torch.nn.init.constant_(model.weight, step)
        assert save(step, model, optimizer) == "saved"
    forget(folder)
    other, other_optimizer = training()
    assert load(step=0, model=other, optimizer=other_optimizer) == 2
    assert torch.equal(other.weight, model.weight)
    with ropeteam.open(rank=0, world_size=1) as rope, rope.view(2) as view:
        assert view.metadata["prefix"] == "checkpoint" and view.metadata["run"] == "bert"
        assert view.metadata["time"] > 0


def test_a_step_that_the_function_cannot_read_gives_way_to_an_older_one(folder, caplog):
    save, load = functions(folder)
    parts = training()
    for step in range(3):
        save(step, *parts)
    whole = torch.load

    def failing(path):
        if "model_2" in str(path):
            raise RuntimeError("not a checkpoint")
        return whole(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", failing)
        assert load(0, *training()) == 1
    assert "step 2 cannot be loaded, an older one is tried: load() failed: RuntimeError: not a" in caplog.text


def test_so_many_steps_files_stay_in_the_directory(folder):
    save, _ = functions(folder, max_checkpoints=2)
    for step in range(5):
        save(step, *training())
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "model_3.pt", "model_4.pt"]


def test_another_prefix_is_another_checkpoint(folder):
    first, load_first = functions(folder, "first")
    second, _ = functions(folder, "second")
    first(0, *training())
    second(1, *training())
    assert load_first(0, *training()) == 0


def test_a_failed_save_is_a_warning(folder, fake, caplog):
    save, load = functions(folder)
    fake.fake_fail(b"save_begin", Code.UNAVAILABLE)
    assert save(0, *training()) == "saved" and "step 0 is not safe, training goes on" in caplog.text
    assert load(0, *training()) is None


def test_the_functions_own_errors_are_raised_and_nothing_is_saved(folder):
    @skypilot.save_checkpoint(save_dir=str(folder))
    def broken(step):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken(1)
    with pytest.raises(ropeteam.InvalidArgument, match="number of the step"):
        broken("now")
    with ropeteam.open(rank=0, world_size=1) as rope:
        assert rope.latest() is None


def test_a_file_that_is_not_below_the_directory_is_not_written(folder):
    with pytest.raises(ropeteam.Corrupt, match="not below"):
        skypilot._write(folder, {"../evil": torch.ones(1, dtype=torch.uint8)})
    assert not (folder / ".." / "evil").exists()
