"""Loss and gradients of a family through our path beside those of transformers' `eager` attention.

The reference runs each packed document by itself, with positions from 0, so that it knows no masks of ours.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from models.huggingface.model import DoubleCasts
from tests.support.huggingface_families import FAMILIES, eager_model
from tests.support.runs import TINY, Packed, gradients_of, prepared, write_run
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.data.batches.micro_batches import read_step
from torchtitan_cp.data.batches.packed_stream import PackedSequence

LOSS, GRADIENT = 5e-6, 5e-5

Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """A sequence of a batch: `tokens` and `labels` `[S]`, cut into documents of these lengths."""

    tokens: Tensor
    labels: Tensor
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Comparison:
    """Loss of a step here and by `eager`; relative error of each parameter's gradient."""

    loss: float
    eager_loss: float
    errors: dict[str, float]

    def check(self) -> None:
        assert abs(self.loss - self.eager_loss) <= LOSS * self.eager_loss, (self.loss, self.eager_loss)
        worst = max(self.errors, key=lambda name: self.errors[name])
        assert self.errors[worst] <= GRADIENT, (worst, self.errors[worst])


def compare(model: PreTrainedModel, rows: Sequence[Row], loss: float, gradients: Gradients) -> Comparison:
    """A step of ours beside the same of an `eager` model with the same weights, all of it in fp64.

    In fp32 `eager` itself rounds by 8e-5 in Gemma 4, and by how much depends on the CPU.
    """
    model.set_experts_implementation("eager")  # grouped products have no fp64
    with DoubleCasts():
        eager_loss, wanted = eager_step(model.double(), rows)
    assert gradients.keys() == wanted.keys(), gradients.keys() ^ wanted.keys()
    errors = {name: _relative_error(gradients[name], want) for name, want in wanted.items()}
    return Comparison(loss, eager_loss, errors)


def eager_step(model: PreTrainedModel, rows: Sequence[Row]) -> tuple[float, Gradients]:
    """Loss and gradients of a step, one document at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        for tokens, labels in zip(row.tokens.split(row.lengths), row.labels.split(row.lengths), strict=True):
            positions = torch.arange(len(tokens))[None]
            logits = model(input_ids=tokens[None], position_ids=positions, use_cache=False).logits
            total = total + F.cross_entropy(logits[0], labels, ignore_index=IGNORED, reduction="sum")
    loss = total / sum(int((row.labels != IGNORED).sum()) for row in rows)
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _relative_error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item() if want.norm() else got.norm().item()


# On ranks, through the trainer ---------------------------------------------------------------------------------


SEQ_LEN = 128
DOCUMENTS = (5, 70, 1, SEQ_LEN - 76)


def write_config(folder: Path, config: dict[str, Any], stage: str = "") -> Path:
    """A config of ours that trains the model of a config.json, with these lines in its stage."""
    (folder / "config.json").write_text(json.dumps(config))
    lines = [line for line in TINY.splitlines() if not line.startswith(("overrides", "flavor"))]
    model = f'[model]\narchitecture = "huggingface"\nconfig = "{folder}/config.json"'
    text = "\n".join(lines).replace("[model]", model).replace("global_batch_tokens = 512", "global_batch_tokens = 256")
    return write_run(folder, f"{text}\n{stage}\n")


def write_family(folder: Path, family: str, stage: str = "") -> Path:
    return write_config(folder, FAMILIES[family], stage)


def compare_on_ranks(path: Path, family: str, *overrides: str) -> Comparison | None:
    """On a rank: the first step of the trainer, with the weights of `eager_model`, on packed documents.

    None on other ranks than the first.
    """
    trainer = prepared(path, "--checkpoint.enable=false", *overrides)
    model = eager_model(FAMILIES[family])
    copy_weights(model, trainer.model.parts[0])
    layout = trainer.enter_stage(trainer.stages[0])
    samples = Restarting(trainer.data_pipeline.samples, DOCUMENTS)
    loss, gradients = gradients_of(trainer, read_step(samples, layout, 0))
    if trainer.world.rank:
        return None
    sequences = [samples.sequence(number) for number in range(layout.sequences)]
    rows = [Row(torch.from_numpy(s.tokens), torch.from_numpy(s.labels), s.document_lengths) for s in sequences]
    return compare(model, rows, loss, gradients)


class Restarting(Packed):
    """Samples whose positions begin at 0 in each document."""

    def sequence(self, number: int) -> PackedSequence:
        positions = np.concatenate([np.arange(length) for length in self.lengths])
        return replace(super().sequence(number), positions=positions)


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Whole parameters to parameters of the same name, sharded or not."""
    whole = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        value: Tensor = whole[name].detach()
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value.clone(), parameter.device_mesh, parameter.placements)
        parameter.copy_(value)


@contextmanager
def eager_backend() -> Iterator[None]:
    """torch.compile without code generation, which takes minutes on a CPU; graphs and autograd are the same."""
    compile_with: Any = partial(torch.compile, backend="aot_eager")
    with mock.patch("torch.compile", lambda function, mode=None, **keys: compile_with(function, **keys)):
        yield


def compare_compiled(path: Path, family: str, *overrides: str) -> Comparison | None:
    """`compare_on_ranks` with compiled layers."""
    torch._dynamo.reset()
    with eager_backend():
        return compare_on_ranks(path, family, "--compile.enable=true", *overrides)
