"""Training on two ranks beside a plain loop: a model of transformers, torch.optim's AdamW, one document at a time."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.hub_models import write_start
from tests.support.rank_pool import RankPool
from tests.support.runs import prepared, run_to_end
from torchtitan_cp.cli import export
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.data.batches.micro_batches import MicroBatch
from torchtitan_cp.data.batches.packed_stream import PackedSequence

PEAKS, THETAS, WEIGHT_DECAY, MAX_NORM = (3e-3, 1e-3), (1000.0, 50_000.0), 0.1, 0.5
FIRST = f"seq_len = 128, steps = 4, global_batch_tokens = 256, cp = 1, rope = {{theta = {THETAS[0]}}}"
SECOND = f"seq_len = 256, steps = 3, global_batch_tokens = 512, cp = 2, rope = {{theta = {THETAS[1]}}}"
SECOND += f', lr = {{peak = {PEAKS[1]}, shape = "linear", warmup_steps = 1, end_fraction = 0.5}}'
OPTIONS = (
    *(
        f"--curriculum.stages=[{{{FIRST}}}, {{{SECOND}}}]",
        "--data.document_mask=true",
        "--data.packing=best_fit",
        "--data.max_document=200",
    ),
    *(f"--optimizer.lr={PEAKS[0]}", "--optimizer.eps=1e-6", f"--optimizer.weight_decay={WEIGHT_DECAY}"),
    *(f"--training.max_grad_norm={MAX_NORM}", "--lr_scheduler.end_fraction=0.1", "--evaluation.passkey.trials=0"),
)
# The first stage follows a cosine from the peak to a tenth of it; the second warms up for a step, then falls to half.
RATES = [PEAKS[0] * (0.55 + 0.45 * math.cos(math.pi * step / 3)) for step in range(4)]
RATES += [PEAKS[1] * share for share in (1.0, 1.0, 0.5)]
ARCHITECTURES = {
    "ours": (),
    "transformers": ("--model.architecture=huggingface", "--model.flavor=", "--model.overrides={}"),
}
Sequences = dict[int, PackedSequence]


def run_and_read(path: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[Sequences]]:
    """On a rank: the lines of a run, and by number the sequences that this rank read in each step."""
    trainer, read = prepared(path, *overrides), list[Sequences]()
    forward_backward = trainer.forward_backward

    def reading(batches: tuple[MicroBatch, ...]) -> Any:
        samples = trainer.data_pipeline.samples
        read.append({number: samples.sequence(number) for batch in batches for number in batch.numbers})
        return forward_backward(batches)

    trainer.forward_backward = reading  # type: ignore[method-assign]
    return run_to_end(trainer), read


def mean_loss(model: PreTrainedModel, sequences: Sequences) -> torch.Tensor:
    """Over the learned tokens of all sequences; each document by itself, so that nothing can leak."""
    total, learned = torch.zeros(()), 0
    for sequence in sequences.values():
        ends = np.cumsum(sequence.document_lengths)
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            tokens, labels = (torch.from_numpy(x[begin:end]) for x in (sequence.tokens, sequence.labels))
            logits = model(tokens[None], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
            learned += int((labels != IGNORED).sum())
    return total / learned


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_run_of_two_stages_equals_a_plain_loop(
    ranks: Callable[[int], RankPool], tmp_path: Path, architecture: str
) -> None:
    path = write_start(tmp_path / "start", "qwen3")
    (lines, read), (_, others) = ranks(2)(run_and_read, path, *OPTIONS, *ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start" / "hub", attn_implementation="eager")
    matrices, vectors = ([x for x in model.parameters() if (x.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-6)
    for step, (line, mine, theirs) in enumerate(zip(lines, read, others, strict=True)):
        model.config.rope_parameters["rope_theta"] = THETAS[step >= 4]
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        loss = mean_loss(model, mine | theirs)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
        assert line["lr"] == pytest.approx(RATES[step], rel=1e-6)
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert norm > MAX_NORM
    assert export.main([str(tmp_path / "start" / "run"), str(tmp_path / "out")]) == 0
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(trained[name], weight, rtol=1e-4, atol=1e-5, msg=name)
