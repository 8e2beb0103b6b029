"""What is measured between steps is what a plain model gives on whole sequences, on any layout of ranks."""

import argparse
import contextlib
import io
import json
import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from models import ARCHITECTURES
from tests.support.deep import deep_rows
from tests.support.rank_pool import RankPool
from tests.support.runs import TINY, prepared, write_run
from torchtitan_cp.checkpoint.weights import open_saved_model
from torchtitan_cp.cli import export, generate
from torchtitan_cp.cli.evaluate import evaluate, evaluation_config, main, write_result
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.curriculum import rope_frequencies
from torchtitan_cp.data.batches.samples import held_out_samples
from torchtitan_cp.evaluation.prompts import Prompt
from torchtitan_cp.runtime.device import start_ranks
from torchtitan_cp.training import registry
from torchtitan_cp.training.evaluator import resized
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.trainer import Trainer

BLOCK = 32
# Two sources, one of which has its documents masked like the other; 9 sequences, which 2 ranks do not share evenly.
SETTINGS = f"""
[evaluation]
at_start = false
interval = 0
tokens = 1152
context_gain_tokens = {BLOCK}
max_share = 1.0

[evaluation.passkey]
lengths = [64, 128]
trials = 3
needle = "#{{{{name:.1}}}}{{{{key:.2}}}}"
question = "#{{{{name:.1}}}}{{{{key:.2}}}}"
"""
TWO_SOURCES = """
[[data.sources]]
name = "early"
source = "text"
path = "{folder}/corpus/[a-c]*.py"
validation_fraction = 0.4

[[data.sources]]
name = "late"
source = "text"
path = "{folder}/corpus/[d-z]*.py"
validation_fraction = 0.4
max_document = 50
"""
MEASURED = (
    TINY.replace('source = "text"\npath = "{folder}/corpus"\n', "document_mask = true\n")
    .replace("validation_fraction = 0.25\n", "")
    .replace("[evaluation]\ntokens = 512\nat_start = false\ninterval = 0\n", SETTINGS + TWO_SOURCES)
)
LAYOUTS = {
    "dp 2": (2, ()),
    "cp 2, zigzag": (2, ("--parallel.cp=2", "--context_parallel.layout=zigzag")),
    "cp 2, balanced": (2, ("--parallel.cp=2", "--context_parallel.layout=balanced")),
    "tp 2": (2, ("--parallel.tp=2",)),
    "pp 2": (2, ("--parallel.pp=2",)),
    "cp 2 x dp 2": (4, ("--parallel.cp=2",)),
}
Sums = tuple[list[str], list[Any], list[float], list[float], list[int]]


def sums(path: Path, *overrides: str) -> Sums:
    """On a rank: sources, sums by source and bin, of the late tokens with all context and with blocks, label counts."""
    trainer = prepared(path, *overrides)
    stage = trainer.stages[0]
    shape = resized(trainer.enter_stage(stage), stage.seq_len)
    whole, cut = (trainer.evaluator.held_out_losses(shape, stage, block) for block in (0, BLOCK))
    assert whole
    assert cut
    assert all(part.training for part in trainer.model.parts)
    return whole.sources, whole.by_bin.tolist(), whole.late.tolist(), cut.late.tolist(), whole.label_counts.tolist()


def plain_logits(trainer: Trainer, tokens: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
    """Of whole sequences in fp64, with masks written out: `[B, S, V]`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        allowed = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril().unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True).transpose(1, 2)

    model = registry.architecture(trainer.config.model).build(trainer.model.args, attend).double()
    parameters = trainer.model.parts[0].named_parameters()
    # An output tied to the embedding is not in the list.
    model.load_state_dict({name: value.full_tensor().double() for name, value in parameters}, strict=False)  # type: ignore[operator]
    stage = trainer.stages[0]
    frequencies, factor = rope_frequencies(stage.rope, trainer.model.args.head_dim, stage.seq_len)
    model.set_rope(frequencies, factor, torch.device("cpu"))  # type: ignore[operator]
    with torch.no_grad():
        return model(tokens, positions, documents)


def plain_sums(path: Path) -> Sums:
    """On one rank: the same by hand, from the plain model and the text."""
    trainer = prepared(path)
    stage = trainer.stages[0]
    trainer.enter_stage(stage)
    pipeline = trainer.data_pipeline
    samples = held_out_samples(pipeline.held_out, 128, pipeline.stage_data(stage), 1152 // 128)
    assert samples
    names, bins = list(samples.packed), [0, 16, 32, 64, 128]
    by_bin = np.zeros((len(names), 2, len(bins) - 1))
    late, label_counts = np.zeros((2, 2)), np.zeros(257, dtype=int)
    for number in range(1152 // 128):
        row = samples.sequence(number)
        label_counts += np.bincount(row.labels[row.labels != IGNORED], minlength=257)
        tokens, labels, places = (torch.from_numpy(x)[None] for x in (row.tokens, row.labels, row.positions))
        documents = torch.repeat_interleave(
            torch.arange(len(row.document_lengths)), torch.tensor(row.document_lengths)
        )[None]
        blocks = documents * 1000 + torch.arange(128) // BLOCK
        losses = [
            F.cross_entropy(plain_logits(trainer, tokens, places, seen)[0], labels[0], reduction="none").numpy()
            for seen in (documents, blocks)
        ]
        for place in np.flatnonzero(row.labels != IGNORED):
            column = int(np.searchsorted(bins, place, side="right")) - 1
            by_bin[names.index(row.spans[0].source), :, column] += losses[0][place], 1
            if place >= BLOCK and place % BLOCK >= BLOCK // 2:
                late += [[losses[0][place], 1], [losses[1][place], 1]]
    return names, by_bin.tolist(), late[0].tolist(), late[1].tolist(), label_counts.tolist()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("measured"), MEASURED)


@pytest.fixture(scope="module")
def by_hand(ranks: Callable[[int], RankPool], run: Path) -> Sums:
    return ranks(1)(plain_sums, run)[0]


def test_losses_by_source_position_and_context_are_those_of_a_plain_model(
    ranks: Callable[[int], RankPool], run: Path, by_hand: Sums
) -> None:
    sources, by_bin, late, cut, label_counts = ranks(1)(sums, run)[0]
    assert sources == by_hand[0] == ["early", "late"]
    assert np.array(by_bin) == pytest.approx(np.array(by_hand[1]), rel=1e-6)
    assert late == pytest.approx(by_hand[2], rel=1e-6)
    assert cut == pytest.approx(by_hand[3], rel=1e-6)
    assert label_counts == by_hand[4]
    assert late[1] == cut[1] > 0, "the same tokens"
    assert late[0] != cut[0]


@deep_rows("layout", LAYOUTS, default=["tp 2", "pp 2", "cp 2 x dp 2"])
def test_losses_by_position_are_the_same_bin_by_bin_on_every_layout(
    ranks: Callable[[int], RankPool], run: Path, by_hand: Sums, layout: str
) -> None:
    size, overrides = LAYOUTS[layout]
    for _, by_bin, late, cut, label_counts in ranks(size)(sums, run, *overrides):
        assert label_counts == by_hand[4]
        assert np.array(by_bin) == pytest.approx(np.array(by_hand[1]), rel=1e-5)
        assert late == pytest.approx(by_hand[2], rel=1e-5)
        assert cut == pytest.approx(by_hand[3], rel=1e-5)


COUNT = 5


def prompts(path: Path) -> list[Prompt]:
    """On one rank: prompt n asks for 4 tokens that a plain model finds likeliest, but has n of them wrong."""
    trainer = prepared(path)
    trainer.enter_stage(trainer.stages[0])
    made = []
    for number in range(COUNT):
        tokens = torch.from_numpy(trainer.data_pipeline.filler(number, 64))
        logits = plain_logits(trainer, tokens[None], torch.arange(64), torch.zeros(1, 64, dtype=torch.int64))[0]
        best, second = logits.topk(2).values.T
        asked = torch.argsort(second - best)[:4]
        assert (best - second)[asked].min() > 1e-3, "no rounding decides"
        labels = torch.full((64,), IGNORED)
        labels[asked] = (logits.argmax(-1)[asked] + (torch.arange(4) < number)) % 257
        made.append(Prompt(tokens.numpy(), labels.numpy()))
    return made


@pytest.fixture(scope="module")
def made(ranks: Callable[[int], RankPool], run: Path) -> list[Prompt]:
    return ranks(1)(prompts, run)[0]


def answers(path: Path, made: list[Prompt], *overrides: str) -> list[bool]:
    """On a rank: whether each of these prompts is answered right."""
    trainer = prepared(path, f"--evaluation.passkey.trials={COUNT}", *overrides)
    shape = trainer.enter_stage(trainer.stages[0])
    evaluator = trainer.evaluator
    evaluator.prompts.write = lambda variant, length, depth, number: made[number]  # type: ignore[method-assign]
    return evaluator.answer_prompts("passkey", [0.0], resized(shape, 64), for_gate=False)


@deep_rows("layout", ["one rank", *LAYOUTS], default=["pp 2", "cp 2 x dp 2"])
def test_an_answer_is_right_where_all_its_tokens_are_the_likeliest_on_every_layout(
    ranks: Callable[[int], RankPool], run: Path, made: list[Prompt], layout: str
) -> None:
    size, overrides = LAYOUTS.get(layout, (1, ()))
    for found in ranks(size)(answers, run, made, *overrides):
        assert found == [True, False, False, False, False]


STAGES = """
[[curriculum.stages]]
seq_len = 128
steps = 2
global_batch_tokens = 512
rope = {{theta = 50.0}}

[[curriculum.stages]]
seq_len = 256
global_batch_tokens = 1024
cp = -1
until = {{passkey_accuracy = 0.0, short_loss_rise = 9.0, max_tokens = 8192}}
"""
GATED = MEASURED[: MEASURED.index("[[curriculum.stages]]")].replace("max_share = 1.0", "max_share = {share}") + STAGES


Evaluated = tuple[list[dict[str, Any]], float | None]


def evaluated(path: Path, *overrides: str) -> Evaluated:
    """On a rank: lines of evaluation.jsonl, and the loss that the first stage left."""
    trainer = prepared(path, "--evaluation.interval=1", "--evaluation.position_seq_len=512", *overrides)
    trainer.run()
    dist.barrier()
    lines = (trainer.folder / "evaluation.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], trainer.progress.short_loss


@pytest.fixture(scope="module")
def gated(ranks: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Evaluated]:
    """The folder of a run whose gate opens, and what it found."""
    folder = tmp_path_factory.mktemp("gated")
    return folder, ranks(2)(evaluated, write_run(folder, GATED.replace("{share}", "1.0")))[0]


def test_a_gate_opens_on_passkeys_and_the_short_length_and_all_that_was_found_is_written(
    gated: tuple[Path, Evaluated],
) -> None:
    _, (lines, short_loss) = gated
    assert [line["step"] for line in lines] == [1, 2, 3], "the gate opened after its stage's first step"
    first, last = lines[1], lines[2]
    assert first["loss"] == short_loss
    assert first["short_loss_rise"] is None
    assert last["short_loss_rise"] is not None
    assert abs(last["short_loss_rise"]) < 0.2
    assert last["retrieval"]["passkey"]["lengths"] == [64, 128]
    accuracy = last["retrieval"]["passkey"]["accuracy"]
    assert np.shape(accuracy) == (5, 2)
    assert last["passkey_accuracy"] == pytest.approx(np.mean(accuracy, 0)[1])
    assert last["position_starts"] == [0, 16, 32, 64, 128, 256]
    assert last["context_gain"] is not None
    assert set(last["by_source"]) == {"early", "late"}
    assert not last["left_out"]


@pytest.mark.deep
def test_without_time_what_a_gate_asks_for_is_measured_and_nothing_else_and_both_are_told(
    ranks: Callable[[int], RankPool], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, GATED.replace("{share}", "0.0"))
    lines, _ = ranks(1)(evaluated, path)[0]
    assert [line["step"] for line in lines] == [1, 2, 3], "the first look, of which nothing is known, and stages' ends"
    last = lines[-1]
    assert last["short_loss_rise"] is not None
    assert not any(value is None for row in last["retrieval"]["passkey"]["accuracy"] for value in row)
    assert last["context_gain"] is None
    shares = []
    for measure in ("context gain", "loss by position to 512"):
        [told] = [what for what in last["left_out"] if what.startswith(f"{measure} (evaluation.max_share = 0, where ")]
        shares.append(float(told.split()[-5]))
    assert 0 < shares[0] <= shares[1] < 1, "the second would have needed time for both"


ODD = """
[[curriculum.stages]]
seq_len = 130
steps = 1
global_batch_tokens = 520
cp = 1

[[curriculum.stages]]
seq_len = 260
steps = 1
global_batch_tokens = 520
cp = 2
"""


@pytest.mark.deep
def test_a_rank_alone_is_measured_at_odd_lengths(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    text = GATED[: GATED.index("[[curriculum.stages]]")].replace("{share}", "1.0").replace("lengths = [64, 128]\n", "")
    path = write_run(tmp_path, text + ODD.replace("130", "101").replace("260", "203").replace("520", "101"))
    overrides = ("--curriculum.stages[1].cp=1", "--curriculum.stages[1].global_batch_tokens=203")
    lines, _ = ranks(1)(evaluated, path, *overrides)[0]
    assert [line["retrieval"]["passkey"]["lengths"] for line in lines] == [[25, 50, 101], [50, 101, 203]]
    assert lines[1]["short_loss_rise"] is not None


@pytest.mark.deep
def test_a_first_length_that_later_ranks_cannot_share_is_left_out_and_told(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    text = GATED[: GATED.index("[[curriculum.stages]]")].replace("{share}", "1.0")
    path = write_run(tmp_path, text + ODD)
    overrides = ("--evaluation.position_seq_len=0", "--evaluation.passkey.trials=0")
    lines, short_loss = ranks(2)(evaluated, path, *overrides)[0]
    assert [line["step"] for line in lines] == [1, 2]
    assert short_loss == lines[0]["loss"]
    assert lines[1]["short_loss_rise"] is None
    assert "the loss at the first stage's length, which cp x tp = 2 ranks cannot share" in lines[1]["left_out"]


MIXED = """
[[curriculum.stages]]
seq_len = {first}
steps = 2
global_batch_tokens = 512
data = {{{{mixture = {{{{early = 1.0}}}}}}}}

[[curriculum.stages]]
seq_len = 128
global_batch_tokens = 512
data = {{{{mixture = {{{{late = 1.0}}}}}}}}
steps = 2
"""


def write_mixed(folder: Path, first: int = 128) -> Path:
    text = GATED[: GATED.index("[[curriculum.stages]]")].replace("{share}", "1.0") + MIXED.format(first=first)
    return write_run(folder, text)


def unexplained(line: dict[str, Any], *, at_end_of_later_stage: bool) -> list[str]:
    """What of an evaluation is null without a reason in left_out."""
    reasons = {
        "loss": "the loss: ",
        "stage_loss": "the loss on the stage's own mixture",
        "context_gain": "context gain",
        "passkey_accuracy": "passkey",
    }
    if at_end_of_later_stage:
        reasons["short_loss_rise"] = "the loss at the first stage's length"
    nulls = {name: reason for name, reason in reasons.items() if line[name] is None}
    nulls |= {name: f"the loss of {name}: " for name, loss in line["by_source"].items() if loss is None}
    return [name for name, reason in nulls.items() if not any(what.startswith(reason) for what in line["left_out"])]


def test_the_loss_is_of_the_same_text_in_every_stage_and_that_of_the_stages_own_mixture_stands_beside_it(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_mixed(tmp_path)
    lines, short_loss = ranks(2)(evaluated, path, "--evaluation.position_seq_len=0")[0]
    assert [(line["step"], line["seq_len"]) for line in lines] == [(1, 128), (2, 128), (3, 128), (4, 128)]
    for line in lines:
        assert line["loss"] == line["by_source"]["early"], "the first stage's text"
        assert line["unigram"] == lines[0]["unigram"], "the very same tokens"
        assert not unexplained(line, at_end_of_later_stage=line["step"] == 4)
    assert all(line["stage_loss"] == line["loss"] and set(line["by_source"]) == {"early"} for line in lines[:2])
    assert short_loss == lines[1]["loss"]
    for line in lines[2:]:
        assert line["stage_loss"] == line["by_source"]["late"] != line["loss"]
        in_bins = [loss for loss in line["position_losses"] if loss is not None]
        assert min(in_bins) < line["stage_loss"] < max(in_bins), "positions are of the stage's own text"
        assert line["context_gain"] is not None
    found = ranks(1)(grid, tmp_path / "run", tmp_path / "out")[0]
    for name in ("loss", "stage_loss", "unigram", "context_gain"):
        assert found[name] == pytest.approx(lines[3][name], rel=1e-5), f"{name}, by the command"


@deep_rows(
    ("source", "reason"),
    [(0, "early holds"), (1, "late holds")],
    default=[(0, "early holds")],
)
def test_what_is_null_has_a_reason_where_a_stage_holds_nothing_out_or_is_short(
    ranks: Callable[[int], RankPool], tmp_path: Path, source: int, reason: str
) -> None:
    path = write_mixed(tmp_path, first=32)
    settings = f"--data.sources[{source}].validation_fraction=0.0", "--evaluation.position_seq_len=0"
    lines, _ = ranks(1)(evaluated, path, *settings)[0]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["loss"] is not None, "of the first stage that holds text out"
        assert list(line["by_source"]) == ["late" if source == 0 else "early"]
        assert not unexplained(line, at_end_of_later_stage=line["step"] == 4)
    without = lines[:2] if source == 0 else lines[2:]
    for line in without:
        assert line["stage_loss"] is None
        assert "the loss on the stage's own mixture, whose sources hold nothing out" in line["left_out"]
    gap = "context gain: 32 tokens are fewer than 2 x evaluation.context_gain_tokens = 64"
    assert [gap in line["left_out"] for line in lines] == [True, True, False, False]


def measured_and_saved(path: Path, stop_at: int, *overrides: str) -> tuple[list[int], list[int], int]:
    """On a rank, of a run: steps evaluated, steps saved, batches measured after step `stop_at`.

    At the second of those it is asked to stop.
    """
    trainer = prepared(path, "--checkpoint.interval=50", *overrides)
    seen, busy = list[int](), trainer.evaluator.set_activity

    def told(what: str) -> None:
        busy(what)
        seen.append(trainer.progress.step)
        if seen.count(stop_at) == 2 and trainer.world.rank == 1:  # the others hear of it from this one
            trainer.signals.received = signal.SIGTERM

    trainer.evaluator.set_activity = told
    trainer.run()
    dist.barrier()
    saves = sorted(int(folder.name.removeprefix("step-")) for folder in trainer.checkpoints.folder.iterdir())
    written = trainer.folder / "evaluation.jsonl"
    lines = written.read_text().splitlines() if written.exists() else []
    return [json.loads(line)["step"] for line in lines], saves, seen.count(stop_at)


@pytest.fixture
def long_evaluation(tmp_path: Path) -> Path:
    path = write_run(tmp_path)
    path.write_text(path.read_text().replace("[evaluation]\ntokens = 512", "[evaluation]\ntokens = 4096"))
    return path


def test_a_stage_is_evaluated_within_too_where_no_interval_is_given(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    path = write_run(tmp_path, TINY.replace("interval = 0\n", ""))
    [(evaluated_at, _, _)] = ranks(1)(measured_and_saved, path, 0, "--evaluation.max_share=1.0")
    assert evaluated_at == [10, 20]


def test_a_stop_does_not_wait_for_an_evaluation_between_steps(
    ranks: Callable[[int], RankPool], long_evaluation: Path
) -> None:
    often = ("--evaluation.interval=2", "--evaluation.max_share=1.0", "--curriculum.stages[0].steps=6")
    for evaluated_at, saves, batches in ranks(2)(measured_and_saved, long_evaluation, 4, *often):
        assert evaluated_at == [2], "that of step 4 was not finished"
        assert saves == [4]
        assert batches == 2


def test_an_evaluation_of_a_stages_end_that_a_stop_cut_short_is_made_by_the_next_start(
    ranks: Callable[[int], RankPool], long_evaluation: Path
) -> None:
    second = "[[curriculum.stages]]\nseq_len = 256\nsteps = 2\nglobal_batch_tokens = 512\n"
    long_evaluation.write_text(long_evaluation.read_text() + second)
    for stop_at, evaluated, saved in ((3, [], [3]), (5, [3], [3, 5]), (0, [3, 5], [3, 5])):
        for found in ranks(2)(measured_and_saved, long_evaluation, stop_at, "--curriculum.stages[0].steps=3"):
            assert found == (evaluated, saved, 2 if stop_at else 0)
    steps = [
        json.loads(line)["step"] for line in (long_evaluation.parent / "run/metrics.jsonl").read_text().split("\n")[:-1]
    ]
    assert steps == [1, 2, 3, 4, 5], "no step was taken again"
    again = ranks(2)(measured_and_saved, long_evaluation, 0, "--curriculum.stages[0].steps=3")[0]
    assert again == ([3, 5], [3, 5], 0), "a finished run does nothing"


def test_a_length_that_does_not_hold_the_question_is_told(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    question = "--evaluation.passkey.question=" + json.dumps("x" * 70 + "{name}: {key}")
    lines = ranks(1)(too_short, write_run(tmp_path, MEASURED), question)[0]
    assert lines == ["passkey at 64 tokens, too short for its question"]


def too_short(path: Path, question: str) -> list[str]:
    trainer = prepared(path, question)
    evaluator, stage = trainer.evaluator, trainer.stages[0]
    found = evaluator.measure_retrieval(stage, resized(trainer.enter_stage(stage), stage.seq_len))
    assert math.isnan(found["passkey"].accuracy[0, 0])
    assert not math.isnan(found["passkey"].accuracy[0, 1])
    return evaluator.time.left_out


def grid(folder: Path, out: Path, number: int | None = None, tokens: int | None = None) -> dict[str, Any]:
    """On a rank: what the program finds of a run's newest checkpoint, as it writes it."""
    register(ARCHITECTURES)
    saved = open_saved_model(folder)
    options = argparse.Namespace(variants=None, lengths=None, trials=None, tokens=tokens)
    world = start_ranks(60.0)
    found = evaluate(saved, evaluation_config(saved.config, world.size, options), world, number)
    if world.rank == 0:
        write_result(out, saved, saved.stage, found)
    dist.barrier()
    return json.loads((out / "evaluation.json").read_text())


def test_the_program_finds_in_a_checkpoint_what_the_run_found_at_its_end_on_any_ranks(
    ranks: Callable[[int], RankPool], gated: tuple[Path, Evaluated], tmp_path: Path
) -> None:
    folder, (lines, _) = gated
    last = lines[-1]
    for size in (1, 2):
        found = ranks(size)(grid, folder / "run", tmp_path / f"out{size}")[0]
        assert (found["stage"], found["seq_len"]) == (last["stage"], 256)
        assert found["retrieval"] == last["retrieval"]
        for name in ("loss", "unigram", "context_gain", "short_loss_rise", "position_losses"):
            assert found[name] == pytest.approx(last[name], rel=1e-4, abs=1e-6), name
        pictures = {picture.name for picture in (tmp_path / f"out{size}").glob("*.png")}
        assert pictures == {"passkey.png", "loss_by_position.png"}
    at_first_length = ranks(2)(grid, folder / "run", tmp_path / "first", 0)[0]
    assert at_first_length["loss"] / lines[1]["loss"] - 1 == pytest.approx(last["short_loss_rise"], rel=1e-3)
    of_other_tokens = ranks(2)(grid, folder / "run", tmp_path / "tokens", None, 256)[0]
    assert of_other_tokens["loss"] != pytest.approx(last["loss"], rel=1e-4)
    few = "the loss of late: evaluation.tokens = 256 gives it no sequence of 256 tokens"
    assert (of_other_tokens["left_out"], of_other_tokens["held_out_epochs"]["late"]) == ([few], 0)
    assert of_other_tokens["short_loss_rise"] == pytest.approx(last["short_loss_rise"], rel=1e-3)
    code, said = ranks(1)(refused, str(folder / "run"), "--stage", "9")[0]
    assert code == 2
    assert said.startswith("error: --stage 9 does not exist")
    few = (str(folder / "run"), "--trials", "1", "--tokens", "64", "--lengths")
    code, said = ranks(1)(refused, *few, "3")[0]
    assert code == 2
    assert "error: none of --lengths is measured; left out: " in said
    assert "passkey at 3 tokens, too short for its question" in said
    assert not list((folder / "run" / "evaluation").glob("*/*")), "a result that is there stays"
    code, said = ranks(1)(refused, *few, "128", "--stage", "1")[0]
    written = [file.parent.name for file in (folder / "run/evaluation").glob("*/evaluation.json")]
    assert (code, written) == (0, ["step-3-stage-1"]), "the checkpoint's own result stays"
    code, said = ranks(1)(refused, *few, "300", "--stage", "9")[0]
    assert said.startswith("note: longer than the 256 tokens that")


def test_a_checkpoint_is_evaluated_under_any_name_and_found_by_its_links(
    ranks: Callable[[int], RankPool], gated: tuple[Path, Evaluated], tmp_path: Path
) -> None:
    run, few = tmp_path / "run", ("--trials", "1", "--tokens", "64", "--lengths", "128")
    shutil.copytree(gated[0] / "run", run, ignore=shutil.ignore_patterns("evaluation"))
    (run / "config.toml").write_text((run / "config.toml").read_text().replace('kernel = "auto"', 'kernel = "flash"'))
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    (run / "checkpoints" / "latest").symlink_to(newest.name)
    (tmp_path / "favourite").symlink_to(newest)
    shutil.copytree(newest, run / "checkpoints" / "copy of it")
    for given in (run / "checkpoints" / "latest", tmp_path / "favourite", run / "checkpoints" / "copy of it"):
        code, said = ranks(1)(refused, str(given), *few)[0]
        written = list((run / "evaluation").glob("*/evaluation.json"))
        assert (code, [file.parent.name for file in written]) == (0, [newest.name]), said
        assert "note: context_parallel.kernel = 'flash' cannot run this model's attention here" in said
        written[0].unlink()


@pytest.mark.parametrize("command", ["evaluate", "generate", "export"])
def test_a_checkpoint_that_was_copied_out_of_its_run_is_told_what_it_lacks(
    ranks: Callable[[int], RankPool],
    gated: tuple[Path, Evaluated],
    tmp_path: Path,
    command: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    newest = max((gated[0] / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    copy = tmp_path / "here" / "kept"
    shutil.copytree(newest, copy)
    if command == "evaluate":
        code, said = ranks(1)(refused, str(copy))[0]
    elif command == "generate":
        code, said = generate.main([str(copy), "--prompt", "def "]), capsys.readouterr().err
    else:
        code, said = export.main([str(copy), str(tmp_path / "out")]), capsys.readouterr().err
    assert code == 2
    assert said.startswith(
        f"error: {copy} is a checkpoint outside its run: {tmp_path / 'config.toml'} is missing\n  fix: "
    )
    assert f"or copy config.toml, and tokenizer.model if there is one, from the run's folder to {tmp_path}" in said
    if command == "generate":
        shutil.copyfile(gated[0] / "run" / "config.toml", tmp_path / "config.toml")
        assert generate.main([str(copy), "--prompt", "def ", "--max-tokens", "1"]) == 0


def test_a_run_from_before_there_was_a_bos_has_none(gated: tuple[Path, Evaluated]) -> None:
    written = gated[0] / "run" / "config.toml"
    text = written.read_text()
    assert open_saved_model(gated[0] / "run").config.tokenizer.bos
    try:
        written.write_text(text.replace("\nbos = true\n", "\n"))
        assert not open_saved_model(gated[0] / "run").config.tokenizer.bos
    finally:
        written.write_text(text)


def test_the_program_refuses_text_that_is_not_the_runs(
    ranks: Callable[[int], RankPool], gated: tuple[Path, Evaluated]
) -> None:
    file = gated[0] / "corpus" / "uuid.py"
    text = file.read_text()
    try:
        file.write_text(text + "more = True\n")
        code, said = ranks(1)(refused, str(gated[0] / "run"))[0]
    finally:
        file.write_text(text)
    assert code == 2
    assert "was written with other tokens of late than the config now gives\n" in said


def test_the_program_says_in_one_line_what_is_wrong_with_its_input(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    code, said = ranks(1)(refused, str(tmp_path))[0]
    assert code == 2
    assert said.startswith(f"error: {tmp_path} is not a checkpoint and contains none")


def refused(*words: str) -> tuple[int, str]:
    with contextlib.redirect_stderr(io.StringIO()) as said, patch("torchtitan_cp.cli.evaluate.stop_ranks"):
        return main([*words]), said.getvalue()
