"""A checkpoint of one mesh on another: weights and both moments bit for bit, and the losses that would have come."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support.deep import deep_rows
from tests.support.rank_pool import RankPool
from tests.support.runs import TINY, prepared, write_run
from torchtitan_cp.checkpoint.manager import _state
from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.training.trainer import Trainer

MESHES = {
    "fsdp 4": (4, ()),
    "tp 2 x cp 2": (4, ("--parallel.tp=2", "--parallel.cp=2")),
    "pp 2 x fsdp 2": (4, ("--parallel.pp=2",)),
    "one process": (1, ()),
}
# FSDP cuts the 129 and the 128 rows of two tensor-parallel ranks.
ODD_VOCABULARY = {"tp 2 x fsdp 4": (8, ("--parallel.tp=2", "--parallel.cp=2"))}
EXPERTS = ("--model.architecture=moe", "--model.overrides.ffn_dim=40", "--model.overrides.n_experts=4")
EXPERTS += ("--optimizer.name=muon",)
EXPERT_MESHES = {
    "ep 2 x fsdp 4": (4, (*EXPERTS, "--parallel.ep=2", "--parallel.cp=2")),
    "ep 4": (4, (*EXPERTS, "--parallel.ep=4")),
    "all experts on 2 ranks": (2, EXPERTS),
}
SAVED, AFTER = 2, 2
State = dict[str, Tensor]


def whole_state(trainer: Trainer) -> State:
    """Weights, moments and step counts by name, each whole, of all ranks of the pipeline."""
    state = _state(trainer.model.parts, trainer.model.optimizers)
    own = {
        f"{kind}.{name}": (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for kind, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    every: list[Any] = [None] * trainer.meshes.pp.size()
    dist.all_gather_object(every, own, group=trainer.meshes.pp.get_group())
    return {name: value for stage in every for name, value in stage.items()}


def observed(path: Path, *overrides: str) -> tuple[State, list[float]]:
    """On a rank: a run's state in memory when it is saved or has been loaded, and the losses after that."""
    trainer = prepared(path, *overrides)
    states: list[State] = []
    found: list[float] = []
    save, load, forward_backward = trainer.checkpoints.save, trainer.checkpoints.load, trainer.forward_backward

    def saving(progress: Progress, *arguments: Any, **settings: Any) -> None:
        if progress.step == SAVED:
            states.append(whole_state(trainer))
        save(progress, *arguments, **settings)

    def loading(*arguments: Any) -> None:
        load(*arguments)
        states.append(whole_state(trainer))

    def recorded(batches: Any) -> Any:
        report = forward_backward(batches)
        found.append(report.loss)
        return report

    trainer.checkpoints.save, trainer.checkpoints.load, trainer.forward_backward = saving, loading, recorded  # type: ignore[method-assign]
    trainer.run()
    return states[0], found[-AFTER:]


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("reshard"), TINY.replace("steps = 20", f"steps = {SAVED + AFTER}"))


Saved = tuple[Path, State, list[float]]


@pytest.fixture(scope="module")
def saved(ranks: Callable[[int], RankPool], run_toml: Path) -> Callable[[str], Saved]:
    """The checkpoint of a mesh, what it must hold and the losses that came after it; made once."""
    made: dict[str, Saved] = {}

    def make(mesh: str) -> Saved:
        if mesh not in made:
            size, degrees = {**MESHES, **ODD_VOCABULARY, **EXPERT_MESHES}[mesh]
            folder = run_toml.parent / mesh.replace(" ", "-")
            settings = (f"--job.dump_folder={folder}", f"--checkpoint.interval={SAVED}", "--checkpoint.keep=9")
            state, later = ranks(size)(observed, run_toml, *settings, *degrees)[0]
            made[mesh] = folder / "checkpoints" / f"step-{SAVED}", state, later
        return made[mesh]

    return make


@deep_rows(
    ("other", "mesh"),
    [
        *((other, mesh) for other in MESHES for mesh in MESHES if mesh != "one process"),
        *((other, mesh) for other in EXPERT_MESHES for mesh in EXPERT_MESHES if mesh != other),
        *(pair for mesh in ODD_VOCABULARY for pair in (("one process", mesh), (mesh, "fsdp 4"))),
    ],
    default=[("tp 2 x cp 2", "pp 2 x fsdp 2")],
)
def test_what_one_mesh_saved_another_has_bit_for_bit_and_goes_on_with(
    ranks: Callable[[int], RankPool],
    run_toml: Path,
    tmp_path: Path,
    saved: Callable[[str], Saved],
    mesh: str,
    other: str,
) -> None:
    checkpoint, state, later = saved(mesh)
    shutil.copytree(checkpoint, tmp_path / "checkpoints" / checkpoint.name)
    size, degrees = {**MESHES, **ODD_VOCABULARY, **EXPERT_MESHES}[other]
    loaded, losses = ranks(size)(observed, run_toml, f"--job.dump_folder={tmp_path}", *degrees)[0]
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(loaded[name], value), name
    # The output is the embedding.
    weights = {name.removeprefix("model.") for name in state if name.startswith("model.")} - {"output.weight"}
    moments = {name.rpartition(".")[0] for name, value in state.items() if value.ndim}
    assert {f"optimizer.state.{name}" for name in weights} <= moments
    assert losses == pytest.approx(later, rel=1e-4)
    assert len(losses) == AFTER
