"""Only checkpoints that verify count in checkpoint.keep, whatever was damaged before, between and after saves."""

import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.deep import deep_rows
from tests.support.rank_pool import RankPool
from torchtitan_cp.checkpoint import manifest, retention
from torchtitan_cp.checkpoint.manager import CheckpointManager
from torchtitan_cp.checkpoint.manifest import MANIFEST_FILE, verify_checkpoint
from torchtitan_cp.checkpoint.progress import EVALUATED_FILE, PROGRESS_FILE, Progress, read_progress
from torchtitan_cp.config.run import Checkpoint


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def save(checkpoints: CheckpointManager, step: int, *, stage_end: bool = False, bad_steps: int = 0) -> None:
    model, optimizer = make()
    progress = Progress(step=step, health={"bad_steps": bad_steps})
    checkpoints.save(progress, [model], [optimizer], stage_end=stage_end)


def finish(checkpoints: CheckpointManager) -> None:
    """Wait for the pending save and the deletions after it."""
    checkpoints.wait()
    checkpoints.connect()[1].submit(int).result()
    dist.barrier()


def resume(folder: Path, settings: Checkpoint) -> CheckpointManager:
    """A new process's manager, which has loaded the newest intact checkpoint."""
    checkpoints = CheckpointManager(folder, settings)
    found = checkpoints.find_newest()
    if found:
        model, optimizer = make()
        checkpoints.load(found[0], [model], [optimizer])
    return checkpoints


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def saved_evaluation(folder: Path) -> tuple[Progress, list[str], int]:
    """A stage's end that is saved, evaluated and found again: its progress, its damage, how often it is read."""
    settings = Checkpoint(keep=9)
    checkpoints = CheckpointManager(folder, settings)
    save(checkpoints, 3, stage_end=True)
    checkpoints.save_evaluation(Progress(step=3, evaluated_step=3, short_loss=2.5))
    save(checkpoints, 4)
    finish(checkpoints)
    with patch.object(retention, "compare_files", return_value=[]) as read:
        for manager in (checkpoints, CheckpointManager(folder, settings)):
            assert manager._retention.expired(manager.complete()) == []
    found = CheckpointManager(folder, settings).find_newest(before=4)
    assert found
    return found[1], verify_checkpoint(found[0]), read.call_count


def test_an_evaluation_is_saved_beside_the_checkpoint_of_its_step_which_counts_as_unchanged(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    for progress, damage, read in ranks(2)(saved_evaluation, tmp_path / "checkpoints"):
        assert (progress.evaluated_step, progress.short_loss, damage, read) == (3, 2.5, [], 0)
    (tmp_path / "checkpoints" / "step-3" / EVALUATED_FILE).write_text('{"step": 3, "eval')
    assert read_progress(tmp_path / "checkpoints" / "step-3").evaluated_step == 0, "it is made again"


def tensor_file(path: Path) -> Path:
    return max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: flip_a_bit(tensor_file(path)),
    "cut": lambda path: os.truncate(tensor_file(path), 100),
    "zeroed": lambda path: tensor_file(path).write_bytes(bytes(tensor_file(path).stat().st_size)),
    "gone": lambda path: tensor_file(path).unlink(),
    "table flipped": lambda path: flip_a_bit(path / ".metadata"),
    "no progress": lambda path: (path / PROGRESS_FILE).unlink(),
    "other progress": lambda path: flip_a_bit(path / PROGRESS_FILE),
    "no manifest": lambda path: (path / MANIFEST_FILE).unlink(),
    "manifest cut": lambda path: os.truncate(path / MANIFEST_FILE, 60),
}


def save_after_damage(folder: Path, keep: int, asynchronous: bool, damaged: list[int], damage: str) -> list[list[int]]:
    """Save 10, 20 and 22, damage some, resume, and save 26 and 30: the steps on disk after each of these."""
    settings = Checkpoint(keep=keep, asynchronous=asynchronous)
    checkpoints = CheckpointManager(folder, Checkpoint(keep=9, asynchronous=asynchronous))
    for step in (10, 20, 22):
        save(checkpoints, step)
    checkpoints.close()
    if dist.get_rank() == 0:
        for step in damaged:
            DAMAGES[damage](folder / f"step-{step}")
    dist.barrier()
    checkpoints, found = resume(folder, settings), []
    for step in (26, 30):
        save(checkpoints, step)
        finish(checkpoints)
        found.append(steps(folder))
    checkpoints.close()
    return found


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    ("keep", "damaged", "damage", "left"),
    [
        (2, [22], "flipped", [[20, 22, 26], [26, 30]]),  # the newest is damaged
        (2, [22], "no progress", [[20, 22, 26], [26, 30]]),
        (3, [20], "flipped", [[10, 20, 22, 26], [22, 26, 30]]),  # one in the middle is, which nobody has loaded
        (3, [20], "cut", [[10, 20, 22, 26], [22, 26, 30]]),
        (1, [22], "flipped", [[26], [30]]),
        (2, [10], "gone", [[22, 26], [26, 30]]),
        (3, [20, 22], "table flipped", [[10, 20, 22, 26], [10, 20, 22, 26, 30]]),
    ],
)
def test_a_damaged_checkpoint_takes_no_place_of_those_to_keep(
    ranks: Callable[[int], RankPool],
    tmp_path: Path,
    asynchronous: bool,
    keep: int,
    damaged: list[int],
    damage: str,
    left: list[list[int]],
) -> None:
    assert ranks(1)(save_after_damage, tmp_path, keep, asynchronous, damaged, damage)[0] == left


def damage_what_is_being_saved(folder: Path) -> list[int]:
    """Damage a checkpoint when it has its name and the manager has not asked after it yet; keep = 1."""
    checkpoints = CheckpointManager(folder, Checkpoint(keep=1))
    save(checkpoints, 1)
    finish(checkpoints)
    save(checkpoints, 2)
    while checkpoints._pending and not checkpoints._pending.written.done():
        pass
    DAMAGES["flipped"](folder / "step-2")
    finish(checkpoints)
    checkpoints.close()
    return steps(folder)


def test_a_checkpoint_that_is_damaged_right_after_its_save_deletes_none(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    assert ranks(1)(damage_what_is_being_saved, tmp_path)[0] == [1, 2]


def count_reads(folder: Path, change: Callable[[Path], object] | None, seconds: float) -> tuple[list[str], list[str]]:
    """Files that retention reads in three saves after a resume, and what it says. `change` touches step 20 before."""
    checkpoints = CheckpointManager(folder, Checkpoint(keep=9))
    for step in (10, 20, 30):
        save(checkpoints, step)
    checkpoints.close()
    if change:
        change(folder / "step-20")
    checkpoints, read, said = resume(folder, Checkpoint(keep=3)), list[str](), list[str]()
    compute = manifest.checksum

    def record(path: Path) -> manifest.Checksum:
        if ".partial" not in str(path):  # the writer's own
            read.append(f"{path.parent.name}/{path.name}")
        return compute(path)

    handler = logging.Handler()
    handler.emit = lambda entry: said.append(entry.getMessage())  # type: ignore[method-assign]
    retention.logger.handlers = [handler]
    with patch.object(manifest, "checksum", record), patch.object(retention, "READ_SECONDS", seconds):
        for step in (40, 50, 60):
            save(checkpoints, step)
            finish(checkpoints)
            said.append(f"{steps(folder)}")
    checkpoints.close()
    retention.logger.handlers = []
    return sorted(read), said


def touch(path: Path) -> None:
    """As a copy of the run's folder does that does not keep times."""
    for file in path.iterdir():
        os.utime(file)


def without_times(path: Path) -> None:
    """As a checkpoint from before manifests had times."""
    text = (path / MANIFEST_FILE).read_text()
    (path / MANIFEST_FILE).write_text(text.replace("modified_ns", "unknown"))


FILES = ["step-20/.metadata", "step-20/__0_0.distcp", "step-20/progress.json"]


@pytest.mark.parametrize(("change", "read"), [(None, []), (touch, FILES), (without_times, FILES)])
def test_a_checkpoint_is_read_at_most_once_and_only_if_its_files_were_changed(
    ranks: Callable[[int], RankPool], tmp_path: Path, change: Callable[[Path], object] | None, read: list[str]
) -> None:
    found = ranks(1)(count_reads, tmp_path, change, 30.0)[0]
    assert found == (read, ["[20, 30, 40]", "[30, 40, 50]", "[40, 50, 60]"])


def test_what_takes_too_long_to_read_does_not_count(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    read, said = ranks(1)(count_reads, tmp_path, touch, -1.0)[0]
    assert read == []
    why = "its files have other times than its manifest lists, and take more than -1 s to read"
    assert said[0] == f"{tmp_path / 'step-20'} does not count in checkpoint.keep: {why}"
    assert said[1:] == ["[10, 20, 30, 40]", "[30, 40, 50]", "[40, 50, 60]"]


def save_amid_bad_steps(folder: Path) -> list[int]:
    """Checkpoints 1 and 2 may be gone back to, of which 2 is damaged; 3 to 5 were saved amid bad steps."""
    checkpoints = CheckpointManager(folder, Checkpoint(keep=2, asynchronous=False))
    for step, bad_steps in enumerate((0, 0, 1, 2, 3), start=1):
        save(checkpoints, step, bad_steps=bad_steps)
        if step == 2:
            DAMAGES["flipped"](folder / "step-2")
    checkpoints.close()
    return steps(folder)


def test_the_checkpoint_kept_to_roll_back_to_is_an_intact_one(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    assert ranks(1)(save_amid_bad_steps, tmp_path)[0] == [1, 4, 5]


class Drill:
    """Saves, damage and restarts at random. After each save it is checked what retention has left."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw, self.folder = random.Random(seed), folder
        self.keep = self.draw.choice([1, 1, 2, 2, 3, 4])
        self.step, self.saves, self.stage_ends = 0, 0, set[int]()
        self.checkpoints = self.start()

    def start(self) -> CheckpointManager:
        settings = Checkpoint(keep=self.keep, asynchronous=self.draw.random() < 0.5)
        checkpoints = resume(self.folder, settings)
        self.step = checkpoints.newest_step or 0
        return checkpoints

    def intact(self) -> set[int]:
        """Steps of the checkpoints that verify: everything is read."""
        return {step for step in steps(self.folder) if not verify_checkpoint(self.folder / f"step-{step}")}

    def damage_some(self) -> None:
        """Damage checkpoints by rank 0, the newest or any, but not the last intact one."""
        dist.barrier()
        intact = sorted(self.intact())
        dist.barrier()
        chosen = (
            intact[-1:] if self.draw.random() < 0.5 else self.draw.sample(intact, self.draw.randint(0, len(intact)))
        )
        spared, damage = self.draw.choice(intact), self.draw.choice(sorted(DAMAGES))
        chosen = [step for step in chosen if step != spared]
        if dist.get_rank() == 0:
            for step in chosen:
                DAMAGES[damage](self.folder / f"step-{step}")
        dist.barrier()

    def save(self) -> None:
        self.saves += 1
        self.step += self.draw.randint(1, 3)
        if self.draw.random() < 0.2:
            self.stage_ends.add(self.step)
        else:
            self.stage_ends.discard(self.step)
        save(self.checkpoints, self.step, stage_end=self.step in self.stage_ends)

    def check(self, before: set[int]) -> None:
        """`before`: steps that verified before the deletions, the new ones included."""
        left, reachable = self.intact(), sorted(step for step in before if step <= self.step)
        newest = set(reachable[-self.keep :])
        for_good = {step for step in before if step in self.stage_ends}
        assert newest | for_good <= left, f"keep = {self.keep} of {reachable}, of which {sorted(left)} are left"
        if len(newest) == self.keep:
            expired = {step for step in before - for_good if step < min(newest)}
            assert not expired & set(steps(self.folder)), "what has expired is deleted"

    def run(self, bursts: int) -> int:
        """How many saves there were."""
        for _ in range(bursts):
            before = self.intact() if self.step else set()
            dist.barrier()
            for _ in range(self.draw.randint(1, 4)):
                self.save()
                before.add(self.step)
                if self.draw.random() < 0.5:
                    finish(self.checkpoints)
            finish(self.checkpoints)
            self.check(before)
            self.damage_some()
            if self.draw.random() < 0.7:
                self.checkpoints.close()
                dist.barrier()
                self.checkpoints = self.start()
        self.checkpoints.close()
        return self.saves


def drill(folder: Path, seed: int) -> int:
    shutil.rmtree(folder / f"{seed}", ignore_errors=True)
    dist.barrier()
    return Drill(folder / f"{seed}", seed).run(bursts=8)


@deep_rows("seed", range(40), default=[0, 1])
def test_damage_resumes_and_retention_at_random_always_leave_as_many_intact_ones_as_are_to_be_kept(
    ranks: Callable[[int], RankPool], tmp_path: Path, seed: int
) -> None:
    assert ranks(1 + seed % 2)(drill, tmp_path, seed)[0] > 8
