"""Checkpoints are complete or absent, the newest whole one is found, and a save that fails harms nothing."""

import errno
import io
import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from tests.support.disks import failing_lists, recorded_syncs
from tests.support.rank_pool import RankFailure, RankPool
from torchtitan_cp.checkpoint import manager, manifest
from torchtitan_cp.checkpoint.load import CheckpointReader
from torchtitan_cp.checkpoint.manager import CheckpointManager
from torchtitan_cp.checkpoint.manifest import MANIFEST_FILE, checksum, read_manifest, verify_checkpoint
from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.checkpoint.save import CheckpointWriter, delete_checkpoint, restore_replaced
from torchtitan_cp.checkpoint.weights import SavedModel, load_weights
from torchtitan_cp.config import Config
from torchtitan_cp.config.run import Checkpoint
from torchtitan_cp.config.training import Optimizer
from torchtitan_cp.optim.build import build_optimizer

NOBODY = 65534


class Killed(BaseException):
    """Stands for the end of a process."""


ORDINARY_STREAM = FileSystem.create_stream


def make(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(30, 20)
    nn.init.constant_(model.weight, value)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(checkpoints: CheckpointManager, step: int, value: float = 1.0, *, stage_end: bool = False) -> None:
    model, optimizer = make(value)
    checkpoints.save(Progress(step=step, trained_tokens=7), [model], [optimizer], stage_end=stage_end)
    checkpoints.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def logged() -> list[str]:
    """What the room logs on this rank from now on."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    manager.logger.handlers = [Keep(logging.INFO)]
    manager.logger.setLevel(logging.INFO)
    return lines


def run_round(folder: Path, asynchronous: bool) -> list[str]:
    checkpoints = CheckpointManager(folder, Checkpoint(keep=2, asynchronous=asynchronous))
    for step in (10, 9, 20):
        save(checkpoints, step)
    found = checkpoints.find_newest()
    assert found is not None
    path, progress = found
    assert (path.name, progress.step, progress.trained_tokens) == ("step-20", 20, 7)
    (model, optimizer), (other, other_optimizer) = make(1.0), make(5.0)
    checkpoints.load(path, [other], [other_optimizer])
    assert torch.equal(other.weight, model.weight)
    first, second = (next(iter(o.state.values()))["exp_avg"] for o in (optimizer, other_optimizer))
    assert torch.equal(first, second)
    checkpoints.close()
    return names(folder)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_newest_are_kept_and_read_back_whole(
    ranks: Callable[[int], RankPool], tmp_path: Path, asynchronous: bool
) -> None:
    assert ranks(1)(run_round, tmp_path, asynchronous)[0] == ["step-10", "step-20"]


def change_while_it_is_written(folder: Path) -> tuple[bool, float, list[str]]:
    """Hold the writing thread back until training has changed the weights."""
    checkpoints, (model, optimizer), changed = CheckpointManager(folder), make(1.0), threading.Event()
    write = CheckpointWriter.write_data
    CheckpointWriter.write_data = lambda *arguments: (changed.wait(60), write(*arguments))[1]  # type: ignore
    lines, before, started = logged(), model.weight.detach().clone(), time.monotonic()
    try:
        checkpoints.save(Progress(step=1), [model], [optimizer])
        checkpoints.poll()
        assert "step-1" not in names(folder), "its thread may have made step-1.partial"
        with torch.no_grad():
            model.weight.fill_(9.0)
        changed.set()
        while not (folder / "step-1").exists():
            time.sleep(0.01)
        elapsed = time.monotonic() - started
        time.sleep(0.6)  # in which training goes on
        checkpoints.close()
    finally:
        CheckpointWriter.write_data = write  # type: ignore[method-assign]
    other, other_optimizer = make(5.0)
    checkpoints.load(folder / "step-1", [other], [other_optimizer])
    return torch.equal(other.weight, before), elapsed, lines


def test_a_save_holds_what_was_when_it_began_and_tells_how_long_training_stood_still(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    unchanged, elapsed, lines = ranks(1)(change_while_it_is_written, tmp_path)[0]
    assert unchanged
    assert len(lines) == 1
    assert "step-1: training paused 0." in lines[0]
    seconds = float(lines[0].split(" KiB were on disk after ")[1].removesuffix(" s"))
    assert seconds < elapsed + 0.5


def save_eight_bits(folder: Path) -> tuple[bool, bool]:
    def make_8bit() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(256, 256))
        optimizer = build_optimizer(model, Optimizer(state="8bit"))
        model(torch.randn(4, 256)).sum().backward()
        optimizer.step()
        return model, optimizer

    checkpoints, (model, optimizer), (other, other_optimizer) = CheckpointManager(folder), make_8bit(), make_8bit()
    checkpoints.save(Progress(step=1), [model], [optimizer])
    checkpoints.close()
    checkpoints.load(folder / "step-1", [other], [other_optimizer])
    first, second = (o.state[m[0].weight]["exp_avg"] for m, o in ((model, optimizer), (other, other_optimizer)))
    return type(first) is not torch.Tensor, torch.equal(first.dequantize(), second.dequantize())


@pytest.mark.deep
def test_moments_in_8_bits_are_saved_though_they_cannot_be_staged(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    assert ranks(1)(save_eight_bits, tmp_path)[0] == (True, True)


def go_on_with_an_idle_parameter(folder: Path, steps: int) -> tuple[bool, int]:
    """On a rank: whether steps after a save, a load or neither are alike, and how many parameters have moments."""

    def make_two() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(3, 3), "idle": nn.Linear(3, 3)})
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
        model.get_submodule(name)(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    checkpoints, (model, optimizer), (other, other_optimizer) = CheckpointManager(folder), make_two(), make_two()
    plain, plain_optimizer = make_two()
    for _ in range(steps):
        take_step(model, optimizer, "used")
        take_step(plain, plain_optimizer, "used")
    checkpoints.save(Progress(step=1), [model], [optimizer])
    checkpoints.close()
    checkpoints.load(folder / "step-1", [other], [other_optimizer])
    for name in ("used", "idle"):
        take_step(model, optimizer, name)
        take_step(other, other_optimizer, name)
        take_step(plain, plain_optimizer, name)
    fresh, fresh_optimizer = make_two()
    take_step(fresh, fresh_optimizer, "idle")
    equal = all(
        torch.equal(x, y) and torch.equal(x, z)
        for x, y, z in zip(*(m.parameters() for m in (model, other, plain)), strict=True)
    )
    return equal and torch.equal(fresh["idle"].weight, other["idle"].weight), len(optimizer.state)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_parameter_that_had_no_gradient_goes_on_as_without_a_checkpoint(
    ranks: Callable[[int], RankPool], tmp_path: Path, steps: int
) -> None:
    assert ranks(1)(go_on_with_an_idle_parameter, tmp_path, steps)[0] == (True, 4)


def load_a_buffer(folder: Path) -> tuple[bool, list[float]]:
    def make_with_buffer(value: float) -> nn.Module:
        model, _ = make(value)
        model.register_buffer("bias_of_router", torch.full((3,), value))
        return model

    checkpoints, model, other = CheckpointManager(folder), make_with_buffer(1.0), make_with_buffer(5.0)
    checkpoints.save(Progress(step=1), [model], [torch.optim.AdamW(model.parameters())])
    checkpoints.close()
    path = folder / "step-1"
    load_weights(SavedModel(path, Config(), 0, Progress(), {}, CheckpointReader(path)), [other])
    return torch.equal(other.weight, model.weight), other.get_buffer("bias_of_router").tolist()


def test_a_finished_model_comes_with_its_buffers(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    assert ranks(1)(load_a_buffer, tmp_path)[0] == (True, [1.0, 1.0, 1.0])


def keep_some(folder: Path) -> None:
    checkpoints = CheckpointManager(folder, Checkpoint(keep=2))
    for step in range(1, 11):
        save(checkpoints, step, stage_end=step == 5)
    checkpoints.close()


def test_the_newest_and_the_ends_of_stages_are_kept(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    ranks(1)(keep_some, tmp_path)
    assert names(tmp_path) == ["step-10", "step-5", "step-9"]


def delete_slowly(folder: Path) -> list[str]:
    """What there is after a save, while an expired checkpoint is being deleted."""
    checkpoints, go_on, delete = CheckpointManager(folder, Checkpoint(keep=1)), threading.Event(), delete_checkpoint
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "delete_checkpoint", lambda path: (go_on.wait(5), delete(path)))
        for step in (1, 2):
            save(checkpoints, step)
        found = names(folder)
        go_on.set()
        checkpoints.close()
    return found


def test_training_goes_on_while_an_expired_checkpoint_is_deleted(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    assert ranks(1)(delete_slowly, tmp_path)[0] == ["step-1", "step-2"]
    assert names(tmp_path) == ["step-2"]


# Damage ------------------------------------------------------------------------------------------------------


def save_three(folder: Path) -> None:
    checkpoints = CheckpointManager(folder, Checkpoint(keep=10))
    for step in (1, 2, 3):
        save(checkpoints, step, value=float(step))
    checkpoints.close()


@pytest.fixture(scope="module")
def three(ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3, written by two ranks."""
    folder = tmp_path_factory.mktemp("three")
    ranks(2)(save_three, folder)
    return folder


@pytest.fixture
def folder(three: Path, tmp_path: Path) -> Path:
    shutil.copytree(three, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def find(folder: Path) -> tuple[str, list[str]]:
    lines = logged()
    found = CheckpointManager(folder).find_newest()
    return found[0].name if found else "", lines


def test_what_was_cut_short_is_not_found_and_no_checkpoint_is_no_error(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    assert ranks(1)(find, tmp_path) == [("", [])]
    for name in ("step-8.partial", "step-7.old.partial", "step-x"):
        (tmp_path / name).mkdir()
    assert ranks(1)(find, tmp_path) == [("", [])]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def tensor_file(folder: Path) -> Path:
    """The file with the tensors, which both ranks hold alike, so that one of them writes it."""
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda step: flip_a_bit(tensor_file(step)), ".distcp has another checksum than when it was written"),
        (lambda step: os.truncate(tensor_file(step), 100), ".distcp has 100 bytes and had"),
        (lambda step: tensor_file(step).unlink(), ".distcp cannot be read (No such file or directory)"),
        (lambda step: flip_a_bit(step / ".metadata"), ".metadata has another checksum"),
        (lambda step: (step / "progress.json").write_text("{"), "progress.json cannot be read (JSONDecodeError"),
        (lambda step: (step / "progress.json").write_text('{"step": 2}'), "progress.json has 11 bytes and had"),
        (lambda step: (step / MANIFEST_FILE).unlink(), "manifest.json cannot be read (FileNotFoundError"),
        (lambda step: (step / MANIFEST_FILE).write_text('{"files": []}'), "manifest.json cannot be read"),
        (
            lambda step: (step / MANIFEST_FILE).write_text(
                '{"files": {"x": {"bytes": "1"}}, "step": 3, "stage_end": 0}'
            ),
            "manifest.json cannot be read (TypeError",
        ),
        (
            lambda step: (step / MANIFEST_FILE).write_text('{"files": {}, "step": 3, "stage_end": false}'),
            "manifest.json is not a list of a checkpoint's files",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named_with_its_file_and_skipped(
    ranks: Callable[[int], RankPool], folder: Path, damage: Callable[[Path], object], told: str
) -> None:
    damage(folder / "step-3")
    answers = ranks(2)(find, folder)
    assert [name for name, _ in answers] == ["step-2", "step-2"]
    lines = answers[0][1]
    assert len(lines) == 1
    assert "step-3 is damaged and skipped: " in lines[0]
    assert told in lines[0]
    [alone] = verify_checkpoint(folder / "step-3")
    assert told in alone


def find_where_a_read_fails_once(folder: Path) -> tuple[str, list[str]]:
    """On rank 1."""
    calls = itertools.count()

    def fail_first(path: Path) -> dict[str, Any]:
        if dist.get_rank() == 1 and not next(calls):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return checksum(path)

    with patch.object(manifest, "checksum", fail_first):
        return find(folder)


def test_a_read_that_fails_once_costs_no_checkpoint(ranks: Callable[[int], RankPool], folder: Path) -> None:
    assert ranks(2)(find_where_a_read_fails_once, folder) == [("step-3", [])] * 2


def go_on_before_damage(folder: Path) -> list[list[str]]:
    """Save steps after the newest whole one, up to and past the damaged ones; what lies there after each."""
    checkpoints, found = CheckpointManager(folder, Checkpoint(keep=1)), []
    path, _ = checkpoints.find_newest() or (None, None)
    assert path is not None
    model, optimizer = make(1.0)
    checkpoints.load(path, [model], [optimizer])
    for step in (2, 3, 4):
        save(checkpoints, step)
        checkpoints.close()
        found.append(names(folder))
    return found


def test_a_run_that_goes_on_from_before_damaged_checkpoints_keeps_what_it_saves(
    ranks: Callable[[int], RankPool], folder: Path
) -> None:
    for name in ("step-2", "step-3"):
        flip_a_bit(tensor_file(folder / name))
    assert ranks(1)(go_on_before_damage, folder)[0] == [["step-2", "step-3"], ["step-3"], ["step-4"]]


def test_a_flipped_bit_anywhere_in_any_file_is_found(ranks: Callable[[int], RankPool], folder: Path) -> None:
    for path in sorted((folder / "step-3").iterdir()):
        if path.name != MANIFEST_FILE:
            whole = path.read_bytes()
            flip_a_bit(path)
            assert ranks(2)(find, folder)[0][0] == "step-2", path
            path.write_bytes(whole)
    assert ranks(2)(find, folder)[0][0] == "step-3"


def test_where_all_are_damaged_a_run_does_not_begin_anew(ranks: Callable[[int], RankPool], folder: Path) -> None:
    for step in folder.iterdir():
        flip_a_bit(tensor_file(step))
    with pytest.raises(RankFailure, match=r"(?s)no checkpoint in .* step-1, step-2, step-3 are damaged.*move the fold"):
        ranks(2)(find, folder)


# A disk that fails -------------------------------------------------------------------------------------------


def to_full_disk(self: FileSystem, path: str | os.PathLike, mode: str) -> AbstractContextManager[io.IOBase]:
    """Every byte goes to the system's own full device."""
    return ORDINARY_STREAM(self, "/dev/full" if mode == "wb" else path, mode)


@contextmanager
def on_a_full_disk() -> Iterator[None]:
    FileSystem.create_stream = to_full_disk  # type: ignore[method-assign, assignment]
    yield
    FileSystem.create_stream = ORDINARY_STREAM  # type: ignore[method-assign]


def save_beside_failing_lists(folder: Path) -> list[str]:
    checkpoints = CheckpointManager(folder)
    with failing_lists(lambda path: path.endswith(".partial")):
        save(checkpoints, 1)
    checkpoints.close()
    return sorted(read_manifest(folder / "step-1").files)


def test_the_manifest_lists_files_whose_folder_cannot_be_listed(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    assert ranks(1)(save_beside_failing_lists, tmp_path)[0] == [".metadata", "__0_0.distcp", "progress.json"]


def save_and_list_what_a_power_cut_may_take(folder: Path) -> list[str]:
    checkpoints = CheckpointManager(folder / "run" / "checkpoints")
    with recorded_syncs() as is_flushed:
        save(checkpoints, 1)
    checkpoints.close()
    final = checkpoints.folder / "step-1"
    return [path.name for path in (*final.iterdir(), final, *final.parents[:2]) if not is_flushed(path)]


def test_all_of_a_checkpoint_is_on_disk_with_its_name_when_it_is_announced(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    assert ranks(1)(save_and_list_what_a_power_cut_may_take, tmp_path)[0] == []


def save_on_a_full_disk(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """The disk of rank 1 is full at step 2 and has room again at step 3."""
    checkpoints, lines = CheckpointManager(folder), logged()
    save(checkpoints, 1)
    good = {path.name: path.stat().st_mtime_ns for path in (folder / "step-1").iterdir()}
    if dist.get_rank() == 1:
        with on_a_full_disk():
            save(checkpoints, 2, stage_end=True)
    else:
        save(checkpoints, 2, stage_end=True)
    checkpoints.close()
    dist.barrier()
    between = names(folder)
    assert {path.name: path.stat().st_mtime_ns for path in (folder / "step-1").iterdir()} == good
    assert checkpoints.newest_step == 1
    save(checkpoints, 3)
    checkpoints.close()
    return between, names(folder), lines


def test_a_full_disk_is_told_loudly_leaves_the_last_checkpoint_alone_and_is_tried_again(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    between, after, lines = ranks(2)(save_on_a_full_disk, tmp_path)[0]
    assert between == ["step-1"]
    assert after == ["step-1", "step-3"]
    told = next(line for line in lines if "NO CHECKPOINT" in line)
    assert "NO CHECKPOINT of step 2" in told
    assert f"rank 1: OSError: [Errno {errno.ENOSPC}] No space left on device" in told
    lost = "if that is of a later step, the end of this stage is not kept, nor exported"
    assert f"The next save tries again; {lost}. The last good one is step-1" in told


def save_last_where_the_disk_has_no_byte_left(folder: Path) -> list[str]:
    lines = logged()
    with on_a_full_disk(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5))
        checkpoints = CheckpointManager(folder)
        model, optimizer = make(1.0)
        checkpoints.save(Progress(step=9), [model], [optimizer])
        checkpoints.close()
    return lines


def test_a_full_disk_is_called_so_whatever_torch_says_and_no_other_save_is_promised(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    (line,) = ranks(1)(save_last_where_the_disk_has_no_byte_left, tmp_path)[0]
    assert line.startswith(f"NO CHECKPOINT of step 9 was written to {tmp_path}: No space left on device (rank 0: ")
    assert "). There is no good one yet, so the run would start over.\n  fix: free space there" in line


def save_where_nothing_may_be_written(folder: Path) -> tuple[list[str], list[str]]:
    """As a user who may read the folder only, at step 2; as its owner at step 3."""
    checkpoints, lines = CheckpointManager(folder), logged()
    save(checkpoints, 1)
    owner = os.geteuid()
    folder.chmod(0o555)
    if owner == 0:
        os.seteuid(NOBODY)
    save(checkpoints, 2)
    os.seteuid(owner)
    folder.chmod(0o755)
    save(checkpoints, 3)
    checkpoints.close()
    return names(folder), lines


def test_a_read_only_folder_is_told_and_tried_again(ranks: Callable[[int], RankPool]) -> None:
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        (Path(base) / "checkpoints").mkdir()
        after, lines = ranks(1)(save_where_nothing_may_be_written, Path(base) / "checkpoints")[0]
    assert after == ["step-1", "step-3"]
    [told] = (line for line in lines if "NO CHECKPOINT of step 2" in line and "Permission denied" in line)
    assert "The next save tries again. The last good one is step-1" in told


def save_beside_a_gpu(folder: Path) -> list[str]:
    """Save as where there are GPUs: torch would wait for one, and raises, as there is none."""
    checkpoints, write = CheckpointManager(folder), CheckpointWriter.write_data

    def write_beside_a_gpu(*arguments: Any) -> Any:
        with patch.object(torch.cuda, "is_available", lambda: True):
            return write(*arguments)

    with patch.object(CheckpointWriter, "write_data", write_beside_a_gpu):
        save(checkpoints, 1)
    checkpoints.close()
    return names(folder)


def test_the_thread_that_writes_does_not_wait_for_a_gpu(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    assert ranks(1)(save_beside_a_gpu, tmp_path)[0] == ["step-1"]


def save_while_the_folder_vanishes(folder: Path) -> tuple[list[str], list[str]]:
    checkpoints, lines = CheckpointManager(folder), logged()
    write = CheckpointWriter.write_data
    CheckpointWriter.write_data = lambda *a: (shutil.rmtree(folder), write(*a))[1]  # type: ignore
    save(checkpoints, 1)
    finish = CheckpointWriter.finish
    CheckpointWriter.write_data = write  # type: ignore[method-assign]
    CheckpointWriter.finish = lambda *a, **k: (shutil.rmtree(folder), finish(*a, **k))  # type: ignore
    save(checkpoints, 2)
    CheckpointWriter.finish = finish  # type: ignore[method-assign]
    save(checkpoints, 3)
    checkpoints.close()
    return names(folder), lines


def test_a_folder_that_vanishes_in_a_save_is_told_and_made_again(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    after, lines = ranks(1)(save_while_the_folder_vanishes, tmp_path / "checkpoints")[0]
    assert after == ["step-3"]
    told = [line for line in lines if "NO CHECKPOINT" in line]
    assert len(told) == 2
    assert all("FileNotFoundError" in line for line in told)


def save_stepwise(folder: Path) -> list[str | None]:
    """Names of what is found with conditions; the step whose number is 2 was saved amid bad steps."""
    checkpoints, (model, optimizer) = CheckpointManager(folder, Checkpoint(keep=9, asynchronous=False)), make(1.0)
    for step in (1, 2, 3):
        progress = Progress(step=step, health={"bad_steps": 1} if step == 2 else {})
        checkpoints.save(progress, [model], [optimizer])
    checkpoints.close()
    found = [
        checkpoints.find_newest(),
        checkpoints.find_newest(before=3),
        checkpoints.find_newest(before=3, healthy=True),
        checkpoints.find_newest(before=1),
    ]
    return [entry[0].name if entry else None for entry in found]


def test_a_checkpoint_can_be_sought_before_a_step_and_by_how_it_stood(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    assert ranks(1)(save_stepwise, tmp_path)[0] == ["step-3", "step-2", "step-1", None]


def save_every_bad_step(folder: Path) -> str:
    checkpoints, (model, optimizer) = CheckpointManager(folder, Checkpoint(keep=2, asynchronous=False)), make(1.0)
    for step, bad_steps in enumerate((0, 0, 1, 2, 3, 4), start=1):
        checkpoints.save(Progress(step=step, health={"bad_steps": bad_steps}), [model], [optimizer])
    checkpoints.close()
    found = checkpoints.find_newest(healthy=True)
    assert found
    return found[0].name


def test_the_checkpoint_to_roll_back_to_outlives_those_of_the_bad_steps_after_it(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    assert ranks(1)(save_every_bad_step, tmp_path)[0] == "step-2"
    assert names(tmp_path) == ["step-2", "step-5", "step-6"]


def replace_one(folder: Path) -> tuple[list[str], int]:
    """Names in the folder when the first of two checkpoints of one step is deleted, and whose progress is left."""
    checkpoints, seen = CheckpointManager(folder, Checkpoint(keep=1)), list[str]()
    save(checkpoints, 5)
    delete = shutil.rmtree

    def see(path: Path, **options: bool) -> None:
        seen.extend(names(folder))
        delete(path, **options)

    shutil.rmtree = see  # type: ignore[assignment]
    try:
        save(checkpoints, 5, stage_end=True)
    finally:
        shutil.rmtree = delete
    checkpoints.close()
    return seen, len(checkpoints.stage_ends())


def test_a_second_checkpoint_of_a_step_is_whole_before_the_first_is_deleted(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    assert ranks(1)(replace_one, tmp_path)[0] == (["step-5", "step-5.replaced.partial"], 1)
    assert names(tmp_path) == ["step-5"]


def replace_in_vain(folder: Path, error: type[BaseException]) -> list[list[str]]:
    """Names in the folder after a second checkpoint of a step that cannot be renamed, and at the next start."""
    checkpoints, rename = CheckpointManager(folder), Path.rename
    save(checkpoints, 5)

    def fail(path: Path, target: Path) -> Path:
        if path.name == "step-5.partial":
            raise error
        return rename(path, target)

    Path.rename = fail  # type: ignore[method-assign, assignment]
    delete = manager.delete_partial
    if error is Killed:  # nothing comes after it
        manager.delete_partial = lambda folder: None
    try:
        save(checkpoints, 5)
    finally:
        Path.rename, manager.delete_partial = rename, delete  # type: ignore[method-assign]
    checkpoints.close()
    after = names(folder)
    restore_replaced(folder)
    return [after, names(folder)]


def test_a_checkpoint_that_was_to_be_replaced_outlives_a_failure_and_a_kill(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    assert ranks(1)(replace_in_vain, tmp_path / "failed", OSError)[0][0] == ["step-5"]
    killed, restarted = ranks(1)(replace_in_vain, tmp_path / "killed", Killed)[0]
    assert "step-5" not in killed
    assert "step-5" in restarted


def roll_back_twice(folder: Path) -> list[str | None]:
    """Which checkpoint each of two rollbacks finds, the second without a healthy step after the first."""
    checkpoints, (model, optimizer) = CheckpointManager(folder, Checkpoint(keep=2, asynchronous=False)), make(1.0)
    back = {"rolled_back_to": 300, "healthy_steps": 0}
    for step, health in ((200, {}), (300, {}), (356, back)):
        checkpoints.save(Progress(step=step, health=health), [model], [optimizer])
    found = [checkpoints.find_newest(before, healthy=True) for before in (400, 300)]
    checkpoints.save(Progress(step=400, health=back | {"healthy_steps": 1}), [model], [optimizer])
    checkpoints.close()
    return [entry[0].name if entry else None for entry in found]


def test_what_a_second_rollback_needs_outlives_the_first(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    assert ranks(1)(roll_back_twice, tmp_path)[0] == ["step-356", "step-200"]
    assert names(tmp_path) == ["step-356", "step-400"]


def seek_before_the_damaged(folder: Path) -> bool:
    return CheckpointManager(folder).find_newest(before=3) is None


def test_older_ones_that_are_damaged_do_not_end_a_run_that_has_newer_ones(
    ranks: Callable[[int], RankPool], folder: Path
) -> None:
    for step in (1, 2):
        flip_a_bit(tensor_file(folder / f"step-{step}"))
    assert ranks(2)(seek_before_the_damaged, folder) == [True, True]


def lose_contact(folder: Path) -> tuple[list[str], list[bool]]:
    """Rank 1 is slower than a save waits for; then it is in time again."""
    checkpoints, write = CheckpointManager(folder, Checkpoint(timeout_seconds=1.0)), CheckpointWriter.write_data
    slow = dist.get_rank() == 1
    CheckpointWriter.write_data = lambda *a: (time.sleep(3.0 * slow), write(*a))[1]  # type: ignore
    save(checkpoints, 1)
    CheckpointWriter.write_data = write  # type: ignore[method-assign]
    lost = [checkpoints.lost_contact]
    dist.barrier()
    checkpoints.close()  # as the trainer does before the next save, where a rank lost contact
    save(checkpoints, 2)
    lost.append(checkpoints.lost_contact)
    checkpoints.close()
    return names(folder), lost


def test_after_ranks_lost_each_other_in_a_save_the_next_one_has_a_group_of_its_own(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    found = ranks(2)(lose_contact, tmp_path)
    assert "step-2" in found[0][0]
    assert any(lost[0] for _, lost in found)
    assert not any(lost[1] for _, lost in found)
