"""Stages over mixtures of packed documents: stopped anywhere, on any ranks, a run reads what an unbroken one reads."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.fsdp import fully_shard

from tests.support.curricula import MIXED, dimensions, losses_of
from tests.support.deep import deep_rows
from tests.support.memory import masked
from tests.support.rank_pool import RankFailure, RankPool
from tests.support.runs import TINY, prepared, train, write_run
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.curriculum import rope_frequencies
from torchtitan_cp.data.batches.micro_batches import read_step
from torchtitan_cp.metrics.console_sink import ConsoleSink
from torchtitan_cp.training import registry

STEPS = 10

Read = list[tuple[int, int, tuple[int, ...], Any]]


class Stopped(Exception):
    """The run ends here, as if killed after a step's checkpoint."""


def train_on(path: Path, stop_after: int, *overrides: str) -> tuple[Read, list[float]]:
    """On a rank: (stage, step, samples, their text) of each step it takes, and its losses; stopped after some steps.

    One of the sources is of conversations.
    """
    trainer = prepared(path, "--checkpoint.interval=1", "--training.loss_normalization=conversation", *overrides)
    trainer.data_pipeline.streams["late"] = masked(trainer.data_pipeline.streams["late"])
    read: Read = []
    losses: list[float] = []
    forward_backward, step = trainer.forward_backward, trainer._step

    def recorded(batches: Any) -> Any:
        for batch in batches:
            spans = [trainer.data_pipeline.samples.sequence(number).spans for number in batch.numbers]
            read.append((trainer.progress.stage, trainer.progress.stage_step, batch.numbers, spans))
        report = forward_backward(batches)
        losses.append(report.loss)
        return report

    def stopping(*arguments: Any) -> None:
        if len(losses) == stop_after:
            trainer.checkpoints.close()
            raise Stopped
        step(*arguments)

    trainer.forward_backward, trainer._step = recorded, stopping  # type: ignore[method-assign]
    try:
        trainer.run()
    except Stopped:
        dist.barrier()
    return read, losses


def samples_of(answers: list[tuple[Read, list[float]]]) -> dict[tuple[int, int, int], Any]:
    """(stage, step, sample) -> its text, of all ranks together."""
    found = {}
    for read, _ in answers:
        for stage, step, numbers, spans in read:
            found.update({(stage, step, number): text for number, text in zip(numbers, spans, strict=True)})
    return found


@pytest.fixture(scope="module")
def straight(ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = write_run(tmp_path_factory.mktemp("mixed"), MIXED)
    folder = f"--job.dump_folder={path.parent}/straight"
    return path, ranks(1)(train_on, path, STEPS, folder, "--checkpoint.enable=false")


@deep_rows("stops", [(2, 5), (4, 3, 2), (7,), (9,)], default=[(4, 3, 2)])
def test_a_run_stopped_anywhere_reads_on_other_ranks_what_an_unbroken_one_reads(
    ranks: Callable[[int], RankPool], straight: tuple[Path, Any], stops: tuple[int, ...]
) -> None:
    path, whole = straight
    folder = f"--job.dump_folder={path.parent}/{'-'.join(map(str, stops))}"
    found: dict[tuple[int, int, int], Any] = {}
    losses: list[float] = []
    for size, steps in zip((2, 4, 1, 2), (*stops, STEPS), strict=False):
        answers = ranks(size)(train_on, path, steps, folder)
        here = samples_of(answers)
        assert not found.keys() & here.keys(), "no step is taken twice"
        found |= here
        losses += answers[0][1]
    assert found == samples_of(whole)
    assert losses == pytest.approx(whole[0][1], rel=1e-4)


def test_every_token_of_a_source_is_read_before_one_comes_again(straight: tuple[Path, Any]) -> None:
    """Sequences of conversations, which are cut only where they do not fit, may end with padding."""
    _, whole = straight
    texts = samples_of(whole)
    places = [
        (span.source, span.document, place)
        for text in texts.values()
        for span in text
        for place in range(span.start, span.stop)
    ]
    padding = [
        (text[0].source, {0: 128, 1: 256, 2: 512}[stage] - sum(span.stop - span.start for span in text))
        for (stage, _, _), text in texts.items()
    ]
    assert all(0 <= rest <= (source == "late") * 256 for source, rest in padding), padding
    assert len(places) + sum(rest for _, rest in padding) == 4 * 512 + 3 * 1024 + 3 * 2048
    assert len(set(places)) == len(places)
    assert {source for source, _, _ in places} == {"early", "late"}


EXCHANGES = ("ring", "all_gather", "all_to_all")


def documents_alone(path: Path) -> tuple[dict[str, float], float, int]:
    """On a rank: a step's loss by exchange, that of its documents one by one on the plain model, and their number."""
    trainer = prepared(path, "--parallel.cp=2")
    losses = {}
    for exchange in EXCHANGES:
        stage = dataclasses.replace(trainer.stages[2], strategy=exchange)
        shape = trainer.enter_stage(stage)
        losses[exchange] = trainer.forward_backward(read_step(trainer.data_pipeline.samples, shape, 0)).loss
    model = registry.architecture(trainer.config.model).build(trainer.model.args, plain_attention)
    weights = {name: p.full_tensor().detach() for name, p in trainer.model.parts[0].named_parameters()}  # type: ignore[attr-defined]
    model.load_state_dict(weights, strict=False)
    model.set_rope(*rope_frequencies(stage.rope, trainer.model.args.head_dim, stage.seq_len), torch.device("cpu"))  # type: ignore[operator]
    total, tokens, documents = 0.0, 0, 0
    for number in range(shape.sequences):
        sequence = trainer.data_pipeline.samples.sequence(number)
        edges = [0, *torch.tensor(sequence.document_lengths).cumsum(0).tolist()]
        for start, stop in itertools.pairwise(edges):
            labels = torch.from_numpy(sequence.labels[start:stop])
            with torch.no_grad():
                logits = model(torch.from_numpy(sequence.tokens[None, start:stop]), torch.arange(stop - start), None)[0]
            total += F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").item()
            tokens += int((labels != IGNORED).sum())
            documents += 1
    return losses, total / tokens, documents


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: object, window: int) -> torch.Tensor:
    rows = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2)


def test_the_loss_of_packed_documents_is_that_of_each_alone_whatever_the_exchange(
    ranks: Callable[[int], RankPool], straight: tuple[Path, Any]
) -> None:
    for losses, alone, documents in ranks(2)(documents_alone, straight[0]):
        assert documents > 8
        assert losses == {exchange: pytest.approx(alone, rel=1e-5) for exchange in EXCHANGES}


def moments(path: Path) -> tuple[bool, bool]:
    """On a rank: whether the optimizer has moments before the third stage's first step, and after."""
    steps = [f"--curriculum.stages[{stage}].steps={number}" for stage, number in enumerate((1, 1, 2))]
    trainer = prepared(path, f"--job.dump_folder={path.parent}/moments", "--checkpoint.enable=false", *steps)
    seen = []
    step = trainer._step

    def watched(stage: Any, batches: Any) -> None:
        if stage.index == 2:
            seen.append(bool(trainer.model.optimizers[0].state))
        step(stage, batches)

    trainer._step = watched  # type: ignore[method-assign]
    trainer.run()
    return seen[0], seen[1]


def test_a_stage_that_resets_the_optimizer_begins_without_moments(
    ranks: Callable[[int], RankPool], straight: tuple[Path, Any]
) -> None:
    assert ranks(1)(moments, straight[0]) == [(False, True)]


RESET = """
[[curriculum.stages]]
seq_len = 128
steps = 2
global_batch_tokens = 512
optimizer_state = "reset"
"""


@pytest.mark.parametrize("layout", ["--parallel.fsdp_reshard=never", "--parallel.pp=2"])
def test_a_stage_that_resets_the_optimizer_trains_what_it_does_with_checkpoints(
    ranks: Callable[[int], RankPool], tmp_path: Path, layout: str
) -> None:
    text = TINY.replace("steps = 20", "steps = 2") + RESET
    path = write_run(tmp_path, text.replace("global_batch_tokens = 512", "global_batch_tokens = 256"))

    def trained(*overrides: str) -> list[float]:
        folder = f"--job.dump_folder={tmp_path / str(len(overrides))}"
        return [line["loss"] for line in ranks(2)(train, path, layout, folder, *overrides)[0]]

    assert trained("--checkpoint.enable=false") == trained()


GATED = (
    TINY[: TINY.index("[[curriculum.stages]]")]
    + """
[[curriculum.stages]]
seq_len = 64
global_batch_tokens = 256
until = {{validation_loss = 5.2, max_tokens = 10240}}

[[curriculum.stages]]
seq_len = 128
global_batch_tokens = 256
until = {{validation_loss = 0.1, max_tokens = 768}}
"""
)
GATE_SCALARS = ("validation_loss", "validation_loss_wanted", "of_max_tokens")


def gated(path: Path, *overrides: str) -> tuple[int, list[tuple[int, int]], str]:
    """On a rank: steps of the whole run, the (stage, step) of each that is taken now, and what is said."""
    trainer = prepared(path, "--evaluation.interval=2", *overrides)
    taken: list[tuple[int, int]] = []
    forward_backward = trainer.forward_backward

    def recorded(batches: Any) -> Any:
        taken.append((trainer.progress.stage, trainer.progress.stage_step))
        return forward_backward(batches)

    trainer.forward_backward = recorded  # type: ignore[method-assign]
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConsoleSink, "print", lambda console, text: said.append(text))
        trainer.run()
    assert sum(row[2] for row in trainer.progress.stage_losses.values()) == trainer.progress.step
    return trainer.progress.step, taken, "\n".join(said)


@pytest.mark.deep
def test_a_gate_ends_a_stage_early_and_the_limit_ends_one_that_does_not_open(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_run(tmp_path, GATED)
    steps, taken, said = ranks(2)(gated, path, "--metrics.tensorboard=true")[0]
    first = [step for stage, step in taken if stage == 0]
    second = [step for stage, step in taken if stage == 1]
    assert 2 <= len(first) < 40, "the gate opened before max_tokens"
    assert len(first) % 2 == 0, "after an evaluation"
    assert second == [0, 1, 2], "max_tokens ends the stage whose gate stays shut"
    assert steps == len(first) + 3
    assert f"stage 1 ends after {len(first)} of 40 steps: validation_loss" in said
    assert "read so far: corpus 0.0" in said
    assert "stage 2 ends at max_tokens, and its gate did not open: validation_loss" in said
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    progress = {name: {event.step: event.value for event in board.Scalars(f"gate/{name}")} for name in GATE_SCALARS}
    measured, wanted, share = (progress[name] for name in GATE_SCALARS)
    assert measured[len(first)] <= wanted[len(first)] == pytest.approx(5.2)
    assert measured[steps] > wanted[steps] == pytest.approx(0.1)
    shares = {step: step / 40 for step in range(2, len(first) + 1, 2)} | {steps - 1: 2 / 3, steps: 1}
    assert share == pytest.approx(shares)
    assert ranks(1)(gated, path)[0][:2] == (steps, []), "a finished run has nothing to do"


def train_to_an_end(path: Path) -> tuple[bool, int]:
    trainer, waits = prepared(path), list[bool]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtitan_cp.training.trainer.start_exports", lambda *_: waits.append)
        trainer.run()
    dist.barrier()
    assert waits == [not trainer.needs_relaunch], "exports go on after a relaunch"
    return trainer.needs_relaunch, trainer.progress.stage


def test_stages_with_a_tp_and_pp_of_their_own_go_on_from_the_checkpoint_between(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    plain, changing = dimensions(tmp_path / "plain", 1, 1), dimensions(tmp_path / "changing", 2, 2)
    assert ranks(1)(train_to_an_end, plain) == [(False, 2)]
    assert ranks(2)(train_to_an_end, changing) == [(True, 1)] * 2
    assert ranks(2)(train_to_an_end, changing) == [(True, 2)] * 2
    assert ranks(2)(train_to_an_end, changing) == [(False, 2)] * 2
    assert len(losses_of(changing.parent)) == 9
    assert losses_of(changing.parent) == pytest.approx(losses_of(plain.parent), rel=1e-4)


@pytest.mark.deep
def test_a_pipeline_goes_through_stages_of_other_lengths_without_a_restart(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    plain, piped = dimensions(tmp_path / "plain", 1, 1), dimensions(tmp_path / "piped", 1, 2)
    piped.write_text(piped.read_text() + "\n[parallel]\npp = 2\n")
    assert ranks(1)(train_to_an_end, plain) == [(False, 2)]
    assert ranks(2)(train_to_an_end, piped) == [(False, 2)] * 2
    assert losses_of(piped.parent) == pytest.approx(losses_of(plain.parent), rel=1e-4)


def frees_its_weights(path: Path, *overrides: str) -> list[bool]:
    """On a rank: whether the first stage gives each gathered block's weights back after its forward."""
    trainer = prepared(path, *overrides)
    blocks = [layer for part in trainer.model.parts for layer in part.layers.values()]  # type: ignore[operator,union-attr]
    return [fully_shard.state(block)._fsdp_param_group._reshard_after_forward for block in blocks]


@deep_rows(("run", "stage"), [(2, 1), (1, 2)], default=[(2, 1)])
def test_gathered_weights_are_kept_by_a_stages_own_pipeline_and_no_other(
    ranks: Callable[[int], RankPool], tmp_path: Path, run: int, stage: int
) -> None:
    path = write_run(tmp_path)
    found = ranks(2)(frees_its_weights, path, f"--parallel.pp={run}", f"--curriculum.stages[0].pp={stage}")[0]
    assert found
    assert all(frees == (stage == 1) for frees in found)


def test_a_gate_without_held_out_text_and_a_checkpoint_of_a_stage_that_is_gone_are_refused(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_run(tmp_path, GATED)
    with pytest.raises(RankFailure, match="needs held-out text, but none of the stage"):
        ranks(1)(gated, path, "--data.validation_fraction=0.0")
    ranks(1)(gated, path, "--curriculum.stages[0].until={validation_loss = 5.2, max_tokens = 512}")
    first = path.read_text().rpartition("[[curriculum.stages]]")[0]
    path.write_text(first)
    with pytest.raises(RankFailure, match="was written in stage 2, and the config has 1"):
        ranks(1)(gated, path)
