"""The gradients of a masked loss on every layout are those of a plain loop over documents, whoever has the tokens."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.deep import deep_rows
from tests.support.memory import TURN, MemoryStore, masked
from tests.support.rank_pool import RankPool
from tests.support.runs import full_gradients, prepared, train, write_conversations, write_run
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.data.batches.micro_batches import BatchLayout, Samples, assign_sequences, read_step
from torchtitan_cp.data.batches.packed_stream import PackedSequence, Span
from torchtitan_cp.data.batches.samples import held_out_samples
from torchtitan_cp.data.batches.stream import TokenStream
from torchtitan_cp.metrics.console_sink import ConsoleSink
from torchtitan_cp.metrics.jsonl_sink import read_evaluations
from torchtitan_cp.training.evaluator import resized
from torchtitan_cp.training.plain_attention import PlainAttention
from torchtitan_cp.training.short_step import gather, single_model

S = 128
LENGTHS = (5, 70, 1, S - 76)
NORMALIZATIONS = ("token", "conversation", "batch_tokens")
ONE, OTHERS, FIRST, LAST, NONE = (
    "one token in all",
    "other numbers in each sequence",
    "the first rank's alone",
    "the last rank's alone",
    "none",
)
CASES = (ONE, OTHERS, FIRST, LAST, NONE)
FEW = (("token", ONE), ("conversation", OTHERS), ("conversation", LAST), ("batch_tokens", FIRST), ("token", NONE))
# fp32 beside fp64, by norm: all gradients as one vector, and each parameter's (one fp32 rank alone reaches 1.2e-6).
WHOLE, EACH = 1e-6, 2e-6


class Conversations:
    """A stage's sequences as documents of LENGTHS, of which these labels are learned, `[sequences, S]` bool."""

    def __init__(self, samples: Samples, kept: np.ndarray) -> None:
        self.samples, self.kept = samples, kept

    def sequence(self, number: int) -> PackedSequence:
        row = self.samples.sequence(number)
        labels = np.where(self.kept[number], row.labels, IGNORED)
        labels[np.cumsum(LENGTHS) - 1] = IGNORED
        positions = np.concatenate([np.arange(length) for length in LENGTHS])
        spans = tuple(Span("text", index, 0, length) for index, length in enumerate(LENGTHS))
        return PackedSequence(row.tokens, labels, positions, LENGTHS, spans)

    def document_lengths(self, number: int) -> tuple[int, ...]:
        return LENGTHS


def kept_labels(case: str, samples: Samples, layout: BatchLayout, cp: int) -> np.ndarray:
    """Which labels are learned, `[sequences, S]` bool; some tokens of each data- and context-parallel rank."""
    kept = np.zeros((layout.sequences, S), dtype=bool)
    if case == ONE:
        kept[1, 40] = True
    elif case == OTHERS:
        kept = np.arange(S) % 7 < np.arange(layout.sequences)[:, None]
    elif case in (FIRST, LAST):
        dp_rank, cp_rank = (0, 0) if case == FIRST else (layout.dp - 1, cp - 1)
        documents = Conversations(samples, kept)
        numbers = assign_sequences(documents, 0, layout)[:, dp_rank].flatten()
        positions = read_step(documents, layout, 0)[0].plan.layout.positions(cp_rank)
        kept[np.ix_(numbers, positions.numpy())] = True
    return kept


def reference(model: Any, rows: list[PackedSequence], normalization: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step in fp64, one document at a time, from full logits."""
    documents, tokens = [], 0
    for row in rows:
        tokens += len(row.tokens)
        parts = (torch.from_numpy(x).split(LENGTHS) for x in (row.tokens, row.labels))
        for ids, labels in zip(*parts, strict=True):
            if (labels != IGNORED).any():
                logits = model(ids[None], torch.arange(len(ids)), torch.zeros(1, len(ids)))[0]
                documents.append(F.cross_entropy(logits, labels, reduction="none")[labels != IGNORED])
    if not documents:
        return 0.0, {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    loss = {
        "token": lambda: torch.cat(documents).mean(),
        "conversation": lambda: torch.stack([losses.mean() for losses in documents]).mean(),
        "batch_tokens": lambda: torch.cat(documents).sum() / tokens,
    }[normalization]()
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(path: Path, cases: Sequence[tuple[str, str]], *overrides: str) -> None:
    """On a rank: steps whose gradients rank 0 compares with the plain loop's."""
    trainer = prepared(path, *overrides)
    stage, config = trainer.stages[0], trainer.config
    layout, samples = trainer.enter_stage(stage), trainer.data_pipeline.samples
    model = single_model(trainer, stage, gather(trainer, lambda p: p), PlainAttention(), torch.float64)
    for normalization, case in cases:
        documents = Conversations(samples, kept_labels(case, samples, layout, stage.cp))
        rows = [documents.sequence(number) for number in range(layout.sequences)]
        training = dataclasses.replace(config.training, loss_normalization=normalization)
        trainer.model.config = dataclasses.replace(config, training=training)
        report = trainer.forward_backward(read_step(documents, trainer.model.configure_stage(stage), 0))
        gradients = full_gradients(trainer)
        trainer.model.zero_grad()
        assert not report.findings
        assert report.learned_tokens == sum(int((row.labels != IGNORED).sum()) for row in rows)
        if trainer.world.rank == 0:
            loss, wanted = reference(model, rows, normalization)
            assert report.loss == pytest.approx(loss, rel=1e-6), (normalization, case)
            assert gradients.keys() == wanted.keys()
            check_close(gradients, wanted, (normalization, case))


def check_close(gradients: dict[str, Tensor], wanted: dict[str, Tensor], what: Any) -> None:
    def error(got: Tensor, want: Tensor) -> float:
        return ((got.double() - want).norm() / want.norm()).item() if want.norm() else got.norm().item()

    for name, want in wanted.items():
        assert error(gradients[name], want) < EACH, (what, name)
    got, want = (torch.cat([x[name].flatten() for name in wanted]) for x in (gradients, wanted))
    assert error(got, want) < WHOLE, what


TWO_AT_ONCE = "training.micro_batch_sequences=2"
STRATEGY = "context_parallel.strategy="
DEFAULT = {
    "FSDP 2 x CP 2, all-gather": (4, f"parallel.cp=2 {STRATEGY}all_gather"),
    "PP 2 x TP 2": (4, "parallel.pp=2 parallel.tp=2"),
}
LAYOUTS = DEFAULT | {
    "one rank, four micro-batches": (1, ""),
    "CP 4, ring": (4, f"parallel.cp=4 {STRATEGY}ring"),
    "one rank, four sequences at once": (1, "training.micro_batch_sequences=4"),
    "CP 2": (2, "parallel.cp=2"),
    "CP 2 x TP 2, all-to-all": (4, f"parallel.cp=2 parallel.tp=2 {STRATEGY}all_to_all"),
    "CP 4, hybrid": (4, f"parallel.cp=4 {STRATEGY}hybrid context_parallel.all_to_all_ranks=2"),
    "FSDP 2, two sequences at once": (2, TWO_AT_ONCE),
    "FSDP 4": (4, ""),
    "HSDP 2 x CP 2": (4, "parallel.dp_replicate=2 parallel.cp=2"),
    "PP 2 x CP 2": (4, "parallel.pp=2 parallel.cp=2"),
    "PP 2 x FSDP 2": (4, "parallel.pp=2"),
    "TP 2": (2, "parallel.tp=2"),
}


@pytest.fixture(scope="module")
def run_toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("masked"))


@pytest.mark.parametrize("layout", DEFAULT)
def test_a_masked_loss_has_the_gradients_of_a_plain_loop(
    ranks: Callable[[int], RankPool], run_toml: Path, layout: str
) -> None:
    size, keys = LAYOUTS[layout]
    ranks(size)(compare, run_toml, FEW, *(f"--{key}" for key in keys.split()))


# Each layout has every case and every normalization; three layouts in a row have every pair of them.
@pytest.mark.deep
@pytest.mark.parametrize(("number", "layout"), enumerate(layout for layout in LAYOUTS if layout not in DEFAULT))
def test_every_masked_loss_has_the_gradients_of_a_plain_loop_on_every_layout(
    ranks: Callable[[int], RankPool], run_toml: Path, number: int, layout: str
) -> None:
    size, keys = LAYOUTS[layout]
    rows = tuple((NORMALIZATIONS[(number + place) % 3], case) for place, case in enumerate(CASES))
    ranks(size)(compare, run_toml, rows, *(f"--{key}" for key in keys.split()))


def leaks(path: Path) -> dict[str, tuple[bool, bool]]:
    """On a rank, by exchange: whether a changed token changes losses of its own conversation, and any other.

    The conversations are those of a run, packed by its stage, with several in a sequence.
    """
    trainer = prepared(path, "--checkpoint.enable=false", "--parallel.cp=4", "--data.loss_on=all")
    stage, found = dataclasses.replace(trainer.stages[0], all_to_all_ranks=2), {}
    for exchange in ("ring", "all_gather", "all_to_all", "hybrid"):
        layout = trainer.enter_stage(dataclasses.replace(stage, strategies={0: exchange}))
        own_changes, others_change, packed = [], [], []
        for batch in read_step(trainer.data_pipeline.samples, layout, 0):
            changed, own = [], []
            whole, labels = (batch.plan.unshard(x, 1) for x in (batch.tokens, batch.labels))
            for row, number in enumerate(batch.numbers):
                lengths = np.array(trainer.data_pipeline.samples.document_lengths(number))
                packed.append(len(lengths))
                end = np.cumsum(lengths)[lengths.argmax()]
                place = end - lengths.max() // 2
                changed.append((row, place))
                own.append((np.arange(S) >= place) & (np.arange(S) < end))
            at = tuple(torch.tensor(changed).T)
            losses = []
            for change in (0, 1):
                tokens = whole.index_put(at, (whole[at] + change) % 256)
                measured = trainer.model.forward(
                    dataclasses.replace(batch, tokens=batch.plan.shard(tokens, 1)), trainer.model.token_loss
                )
                losses.append(batch.plan.unshard(measured[1], 1))
            different, kept = losses[0] != losses[1], torch.from_numpy(np.stack(own))
            own_changes.append(torch.equal(different & kept, kept & (labels != IGNORED)))
            others_change.append(bool((different & ~kept).any()))
        assert max(packed) > 1
        found[exchange] = all(own_changes), any(others_change)
    return found


def test_no_token_sees_another_conversation_whatever_the_exchange(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    exchanges = ("ring", "all_gather", "all_to_all", "hybrid")
    found = ranks(4)(leaks, write_conversations(tmp_path))[0]
    assert found == {exchange: (True, False) for exchange in exchanges}


class Words(MemoryStore):
    """Short documents in bytes."""

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return super().read(document, start, stop) * 7 % 251


def held_out(path: Path, *overrides: str) -> tuple[float, list[list[float]], str]:
    """On a rank: loss of held-out conversations, its sums and tokens by turn, and what the log says of them."""
    trainer = prepared(path, *CONVERSATIONS, *overrides)
    pipeline, stage = trainer.data_pipeline, trainer.stages[0]
    pipeline.held_out = {name: masked(held_out_stream()) for name in pipeline.held_out}
    layout = trainer.enter_stage(stage)
    losses = trainer.evaluator.held_out_losses(resized(layout, S), stage)
    result = trainer.evaluator.evaluate(stage, layout, trainer.progress, at_end=True)
    assert losses
    assert result
    return losses.loss, losses.by_turn.tolist(), "\n".join(result.lines(1, S))


def held_out_stream() -> TokenStream:
    return TokenStream(Words([130, 30, 21, 90, 300, 50, 45]), S, seed=0, shuffle=False)  # type: ignore[arg-type]


def held_out_by_hand(path: Path) -> tuple[float, list[list[float]]]:
    """On one rank: the same from the plain model and full logits, a document at a time."""
    trainer = prepared(path, *CONVERSATIONS)
    stage, pipeline = trainer.stages[0], trainer.data_pipeline
    trainer.enter_stage(stage)
    weights = gather(trainer, lambda p: p)
    model = single_model(trainer, stage, weights, PlainAttention(), torch.float64)
    name, stream = next(iter(pipeline.held_out)), masked(held_out_stream())
    samples = held_out_samples({name: stream}, S, pipeline.stage_data(stage), 4)
    total, by_turn = np.zeros(2), np.zeros((2, 5))
    for span in [span for number in range(4) for span in samples.sequence(number).spans]:  # type: ignore[union-attr]
        end = min(span.stop + 1, stream.store.document_lengths[span.document])
        ids = torch.from_numpy(stream.store.read(span.document, span.start, end))[None]
        with torch.no_grad():
            logits = model(ids[:, :-1], torch.arange(ids.shape[1] - 1), torch.zeros(ids[:, 1:].shape))[0]
        losses = F.cross_entropy(logits, ids[0, 1:], reduction="none").tolist() if end - span.start > 1 else []
        for place, loss in enumerate(losses, span.start + 1):
            if place // TURN % 2:
                total += loss, 1
                if span.start == 0:
                    by_turn[:, min(4, place // TURN // 2)] += loss, 1
    return total[0] / total[1], by_turn.tolist()


CONVERSATIONS = (
    "--checkpoint.enable=false",
    "--data.packing=best_fit",
    "--data.document_mask=true",
    "--data.restart_positions=true",
    "--evaluation.max_share=1",
    "--evaluation.passkey.trials=0",
)


@pytest.fixture(scope="module")
def by_hand(ranks: Callable[[int], RankPool], run_toml: Path) -> tuple[float, list[list[float]]]:
    return ranks(1)(held_out_by_hand, run_toml)[0]


@deep_rows(
    ("size", "degrees"),
    [(1, ""), (2, "--parallel.cp=2"), (4, "--parallel.cp=2 --parallel.pp=2"), (4, "--parallel.tp=2"), (4, "")],
    default=[(4, "--parallel.cp=2 --parallel.pp=2")],
)
def test_held_out_losses_by_turn_are_those_of_each_conversation_alone(
    ranks: Callable[[int], RankPool],
    run_toml: Path,
    by_hand: tuple[float, list[list[float]]],
    size: int,
    degrees: str,
) -> None:
    loss, by_turn, said = ranks(size)(held_out, run_toml, *degrees.split())[0]
    assert loss == pytest.approx(by_hand[0], rel=1e-5)
    np.testing.assert_allclose(by_turn, by_hand[1], rtol=1e-5)
    first, *_, last = (total / count for total, count in zip(*by_turn, strict=True) if count)
    assert f"by turn: 1 {first:.4f}, 2 " in said
    assert f"{last:.4f}" in said


def train_aloud(path: Path, *overrides: str) -> tuple[list[dict[str, Any]], str]:
    """On a rank: the lines of metrics.jsonl, and what the run said."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConsoleSink, "print", lambda console, text: said.append(text))
        return train(path, *overrides), "\n".join(said)


def test_a_run_on_conversations_records_learned_tokens_cuts_and_the_loss_by_turn(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    stage = (
        "--curriculum.stages[0].steps=2",
        "--parallel.cp=2",
        "--evaluation.max_share=1",
        "--checkpoint.enable=false",
    )
    keys = (*stage, "--evaluation.passkey.trials=0")
    lines, said = ranks(2)(train_aloud, write_conversations(tmp_path), *keys)[0]
    for line in lines:
        assert 0 < line["learned_tokens"] == round(512 * (1 - line["unlabelled"])) < 400
    (evaluated,) = read_evaluations(tmp_path / "run")
    assert [loss is not None for loss in evaluated["turn_losses"]][:2] == [True, True]
    assert re.search(r"corpus: [\d,]+ of [\d,]+ conversations cut, [\d,]+ cuts inside a learned turn", said)
    assert "by turn: 1 " in said
