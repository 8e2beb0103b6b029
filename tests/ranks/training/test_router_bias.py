"""Experts in real runs: biases that follow their load, and what the records, the picture and the log say of it."""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from tests.support.deep import deep_rows
from tests.support.huggingface_parity import write_family
from tests.support.inject import Inject, inject
from tests.support.rank_pool import RankPool
from tests.support.runs import EXPERTS, prepared, run_to_end, write_run

RATE, TOKENS, CHOSEN = 0.02, 256, 2
FIRST = torch.tensor([-10.0, 0, 0, 0, 0, 0])  # nobody chooses the first expert
RUN = (
    f"--training.router_bias_update={RATE}",
    "--curriculum.stages[0].steps=5",
    "--checkpoint.interval=2",
)
# The third step is bad, and is run again.
FAULT = Inject(step=3, layer=1)


@dataclass
class Seen:
    """Of each step that was taken: tokens of each expert of layer 1, counted here, and its bias after the step."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    biases: list[Tensor] = field(default_factory=list)


def watched(path: Path, *overrides: str) -> Seen:
    """On a rank: a run, beside an own count of what the experts are sent."""
    trainer, seen = prepared(path, *RUN, "--health.on_nonfinite=skip", *overrides), Seen()
    inject(trainer, FAULT)
    [part] = trainer.model.parts
    counts, entropy = torch.zeros(trainer.model.args.n_experts), torch.zeros(())

    def count(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        if torch.is_grad_enabled():
            _, chosen, shares = inputs
            shares = shares.detach() / shares.detach().sum(-1, keepdim=True)
            counts.index_add_(0, chosen.flatten(), torch.ones(chosen.numel()))
            entropy.sub_((shares * shares.log()).sum())

    part.experts[1].register_forward_pre_hook(count)  # type: ignore[index, union-attr]
    step, update = trainer._step, trainer._update

    def stepping(*arguments: Any) -> bool:
        counts.zero_(), entropy.zero_()
        return step(*arguments)

    def updating(*arguments: Any) -> None:
        update(*arguments)
        dist.all_reduce(counts)
        dist.all_reduce(entropy)
        seen.counts.append(counts.clone())
        seen.entropy.append(entropy.item())
        seen.biases.append(part.router_biases[1].clone())  # type: ignore[index]

    def running(*arguments: Any) -> None:
        if not trainer.progress.step:
            part.router_biases[1].copy_(FIRST)  # type: ignore[index]
        train(*arguments)

    train = trainer._train
    trainer._step, trainer._update, trainer._train = stepping, updating, running  # type: ignore[method-assign]
    seen.lines = run_to_end(trainer)
    return seen


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("biases"), "DeepSeek-V3")


@pytest.fixture(scope="module")
def straight(ranks: Callable[[int], RankPool], run_toml: Path) -> Seen:
    folder = f"--job.dump_folder={run_toml.parent / 'straight'}"
    first, second = ranks(2)(watched, run_toml, folder, "--parallel.cp=2", "--metrics.tensorboard=true")
    assert all(torch.equal(*pair) for pair in zip(first.biases, second.biases, strict=True))
    return first


def test_biases_follow_the_counts_of_all_ranks_and_a_bad_step_leaves_no_trace(straight: Seen) -> None:
    bias = FIRST
    assert [line["skipped"] for line in straight.lines] == [False, False, True, False, False, False]
    assert len(straight.counts) == 5
    for counts, after in zip(straight.counts, straight.biases, strict=True):
        assert counts.sum() == TOKENS * CHOSEN
        bias = bias + RATE * torch.sign(counts.mean() - counts)
        torch.testing.assert_close(after, bias, rtol=0, atol=1e-6)
        assert len((after - FIRST).unique()) > 1


def test_records_and_the_picture_say_how_tokens_are_spread(straight: Seen, run_toml: Path) -> None:
    healthy = [line for line in straight.lines if not line["skipped"]]
    for line, counts, entropy in zip(healthy, straight.counts, straight.entropy, strict=True):
        assert line["expert_load"] == {"1": pytest.approx((counts.max() / counts.mean()).item())}
        assert line["router_entropy"] == {"1": pytest.approx(entropy / TOKENS, rel=1e-4)}
        assert 0 < line["router_entropy"]["1"] <= math.log(2) + 1e-6
        assert line["idle_experts"] == (counts == 0).double().mean().item() > 0
    board = EventAccumulator(str(run_toml.parent / "straight" / "tensorboard"))
    board.Reload()
    assert [image.step for image in board.Images("experts/load")] == [6]


def test_a_resumed_run_has_the_biases_of_the_straight_one_bit_for_bit(
    ranks: Callable[[int], RankPool], run_toml: Path, straight: Seen
) -> None:
    folder = run_toml.parent / "resumed"
    shutil.copytree(run_toml.parent / "straight", folder)
    for path in (folder / "checkpoints").iterdir():
        if path.name != "step-4":
            shutil.rmtree(path)
    resumed = ranks(2)(watched, run_toml, f"--job.dump_folder={folder}", "--parallel.cp=2")[0]
    assert [line["loss"] for line in resumed.lines] == [line["loss"] for line in straight.lines]
    assert len(resumed.biases) == 2
    for again, before in zip(resumed.biases, straight.biases[3:], strict=True):
        assert torch.equal(again, before)


LAYOUTS = {
    "PP 2": (2, ["--parallel.pp=2", "--training.micro_batch_sequences=2"]),
    "TP 2": (2, ["--parallel.tp=2"]),
    "EP 2, CP 2": (2, ["--parallel.cp=2", "--parallel.ep=2", "--activation.checkpoint=full"]),
    "EP 2, CP 2, TP 2": (4, ["--parallel.cp=2", "--parallel.ep=2", "--parallel.tp=2"]),
    "HSDP 2 x 2, EP 2": (4, ["--parallel.dp_replicate=2", "--parallel.ep=2", "--training.micro_batch_sequences=1"]),
}
BIASED = (
    "--model.overrides.expert_bias=true",
    "--model.overrides.balance=0.0",
    f"--training.router_bias_update={RATE}",
    "--curriculum.stages[0].steps=3",  # an odd number, after which no expert's bias is back at zero
    "--checkpoint.interval=1",
)


def train_with_biases(path: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[int, Tensor]]:
    """On a rank: lines of metrics.jsonl, and the biases of its layers at the end."""
    trainer = prepared(path, *BIASED, *overrides)
    lines = run_to_end(trainer)
    biases = [part.router_biases for part in trainer.model.parts]
    return lines, {layer: bias.clone() for of_part in biases for layer, bias in of_part.items()}  # type: ignore[union-attr, operator]


@pytest.fixture(scope="module")
def native_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("native"), EXPERTS)


@pytest.fixture(scope="module")
def alone(ranks: Callable[[int], RankPool], native_toml: Path) -> tuple[list[dict[str, Any]], dict[int, Tensor]]:
    return ranks(1)(train_with_biases, native_toml, f"--job.dump_folder={native_toml.parent / 'alone'}")[0]


@deep_rows("layout", LAYOUTS, default=["PP 2"])
def test_a_run_that_goes_on_in_any_layout_has_the_loads_and_biases_of_one_rank(
    ranks: Callable[[int], RankPool], native_toml: Path, alone: Any, layout: str
) -> None:
    size, overrides = LAYOUTS[layout]
    folder = native_toml.parent / layout.replace(" ", "-")
    shutil.copytree(native_toml.parent / "alone", folder)
    for later in ("step-2", "step-3"):
        shutil.rmtree(folder / "checkpoints" / later)
    wanted_lines, wanted_biases = alone
    for lines, biases in ranks(size)(train_with_biases, native_toml, f"--job.dump_folder={folder}", *overrides):
        assert len(biases) == (1 if layout == "PP 2" else 2)
        for layer, bias in biases.items():
            torch.testing.assert_close(bias, wanted_biases[layer], rtol=0, atol=1e-6)
        for line, wanted in zip(lines, wanted_lines, strict=True):
            assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
            # Rounding may send one or two of 1,024 choices to another expert.
            assert line["expert_load"] == pytest.approx(wanted["expert_load"], abs=0.012)
            assert line["router_entropy"] == pytest.approx(wanted["router_entropy"], rel=1e-3)
    assert min(bias.abs().max() for bias in wanted_biases.values()) >= RATE


@pytest.mark.parametrize("keys", [(), ("--lora.train=['layers.0.router']", "--activation.checkpoint=full")])
def test_layers_whose_input_has_no_gradient_count_too(
    ranks: Callable[[int], RankPool], native_toml: Path, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    adapters = ("--lora.targets=['layers.1']", "--checkpoint.enable=false", f"--job.dump_folder={tmp_path}/run")
    lines, biases = ranks(1)(train_with_biases, native_toml, *adapters, *keys)[0]
    for line in lines:
        assert set(line["expert_load"]) == {"0", "1"}
        assert all(0.9 * math.log(2) < each <= math.log(2) + 1e-6 for each in line["router_entropy"].values())
    assert biases[0].abs().max() >= RATE


# Nobody chooses the experts of the first of two ranks, which then gets no row, only sends.
HALF = torch.tensor([-10.0, -10, -10, 0, 0, 0])


def train_with_half(path: Path, *overrides: str) -> list[dict[str, Any]]:
    """On a rank: lines of metrics.jsonl, where half of the experts of every layer get no token."""
    losses_of_routers = ("--model.overrides.balance=0.5", "--model.overrides.router_z_loss=0.05")
    trainer = prepared(path, *BIASED, *losses_of_routers, "--checkpoint.enable=false", *overrides)
    train = trainer._train

    def running(*arguments: Any) -> None:
        for part in trainer.model.parts:
            for bias in part.router_biases.values():  # type: ignore[union-attr, operator]
                bias.copy_(HALF)
        train(*arguments)

    trainer._train = running  # type: ignore[method-assign]
    return run_to_end(trainer)


def test_a_run_in_which_a_rank_gets_no_token_has_the_losses_of_one_rank(
    ranks: Callable[[int], RankPool], native_toml: Path
) -> None:
    folder = f"--job.dump_folder={native_toml.parent}/half-"
    wanted = ranks(1)(train_with_half, native_toml, f"{folder}alone")[0]
    shared = ["--parallel.cp=2", "--parallel.ep=2", "--activation.checkpoint=full"]
    for lines in ranks(2)(train_with_half, native_toml, f"{folder}shared", *shared):
        for line, want in zip(lines, wanted, strict=True):
            assert line["idle_experts"] == want["idle_experts"] >= 0.5, (
                "of six experts three, and what few tokens leave idle"
            )
            assert line["loss"] == pytest.approx(want["loss"], rel=1e-5)
            assert line["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
