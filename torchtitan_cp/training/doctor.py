"""The doctor of a config: compares its model on ranks that share one sequence with the same model in one process."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from torchtitan_cp.attention import AttentionMask
from torchtitan_cp.attention.comparison import ModelRun
from torchtitan_cp.attention.doctor import examine, raised_weights
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.data.batches.micro_batches import Samples
from torchtitan_cp.data.batches.packed_stream import PackedSequence
from torchtitan_cp.runtime.device import World
from torchtitan_cp.training.model import LayerAttention
from torchtitan_cp.training.resolve import doctor_config
from torchtitan_cp.training.short_step import ShortStep, check_fits, comparing_trainer, shorten

DOCTOR_TOKENS, MIN_TOKENS = 256, 16


@dataclass(frozen=True)
class ProbeSamples:
    """A stage's sequences, cut into documents of these lengths, with labels on their last two thirds.

    Attributes:
        changed: position of a token to replace by another; None: none.
    """

    samples: Samples
    lengths: tuple[int, ...]
    changed: int | None = None

    def sequence(self, number: int) -> PackedSequence:
        row = self.samples.sequence(number)
        tokens, labels = row.tokens.copy(), np.roll(row.tokens, -1)  # a conversation's own labels may be few, or none
        if self.changed is not None:
            tokens[self.changed] = (tokens[self.changed] + 1) % (tokens.max() + 1)
        labels[: len(labels) // 3] = IGNORED
        positions = np.concatenate([np.arange(length) for length in self.lengths])
        return replace(row, tokens=tokens, labels=labels, positions=positions, document_lengths=self.lengths)

    def document_lengths(self, number: int) -> tuple[int, ...]:
        return self.lengths


def run_doctor(config: Config, world: World, length: int) -> bool:
    """Examine the model on all ranks, and print what was found.

    Args:
        length: tokens of the sequence; 0: at least 256, and more than the largest window.

    Returns:
        whether no fault was found.

    Raises:
        ConfigError: the unsharded model does not fit on one rank, or the sequence is too short for documents.
    """
    trainer = comparing_trainer(doctor_config(config, world.size), world)
    check_fits(trainer)
    # A window that is as long as the stage's sequences masks nothing.
    windows = (mixer.window for mixer in trainer.model.args.mixers if mixer.window < trainer.stages[-1].seq_len)
    largest = max(windows, default=0)
    stage = shorten(trainer, trainer.stages[-1], length, max(DOCTOR_TOKENS, largest * 5 // 4 + 128))
    if stage.seq_len < MIN_TOKENS:
        raise ConfigError(
            f"the doctor cuts a sequence into documents, for which {stage.seq_len} tokens are too few",
            fix=f"give it a length: --doctor {DOCTOR_TOKENS}",
        )
    layout = trainer.enter_stage(stage)
    parts = (7, stage.seq_len // 8, 1)
    lengths = (*parts, stage.seq_len - sum(parts))
    plan = layout.plans(AttentionMask(document_lengths=(lengths,)))[0]
    samples = partial(ProbeSamples, trainer.data_pipeline.samples, lengths)
    with raised_weights(p for p in trainer.model.parts.parameters() if p.is_floating_point()):
        short_step = ShortStep(trainer, stage, layout, samples)

        def single() -> tuple[ModelRun, ModelRun]:
            return short_step.in_one_process(torch.float32), short_step.in_one_process(torch.float32, LayerAttention())

        report = examine(plan, short_step.on_ranks(), single, 1, [*range(world.size)])
    if world.rank == 0:
        if probe := getattr(trainer.model.args, "probe", None):
            rotaries = " and ".join(f"{dims} dims of a head by {name}" for name, dims in probe.rotaries.items())
            routers, softcap = len(probe.routers) or "no", f"{probe.logit_softcap:g}" if probe.logit_softcap else "none"
            print(
                f"{probe.model_class}: {len(probe.layers)} layers; rotary embeddings turn {rotaries or 'nothing'}; "
                f"{routers} routers of experts; logits x {probe.logit_scale:g}, soft cap {softcap}"
            )
        print(report.text)
    return not report.fault
