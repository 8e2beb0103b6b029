"""The doctor of a config: compares its model on ranks that share one sequence with the same model in one process."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.attention.doctor import examine, raised_weights
from torchtitan_cp.attention.recording import ModelRun
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.data.batches.micro_batches import Samples, read_step
from torchtitan_cp.data.batches.samples import PackedSequence
from torchtitan_cp.runtime.device import World
from torchtitan_cp.training import parity
from torchtitan_cp.training.model import LayerAttention
from torchtitan_cp.training.plain_attention import PlainAttention
from torchtitan_cp.training.resolve import doctor_config
from torchtitan_cp.training.trainer import Trainer

DOCTOR_TOKENS, MIN_TOKENS = 256, 16


@dataclass
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
    trainer = Trainer(doctor_config(config, world.size), world, trains=False)
    parity.check_fits(trainer)
    # A window that is as long as the stage's sequences masks nothing.
    windows = (mixer.window for mixer in trainer.model.args.mixers if mixer.window < trainer.stages[-1].seq_len)
    largest = max(windows, default=0)
    stage = parity.shorten(trainer, trainer.stages[-1], length, max(DOCTOR_TOKENS, largest * 5 // 4 + 128))
    if stage.seq_len < MIN_TOKENS:
        raise ConfigError(
            f"the doctor cuts a sequence into documents, for which {stage.seq_len} tokens are too few",
            fix=f"give it a length: --doctor {DOCTOR_TOKENS}",
        )
    layout, peak = trainer.enter_stage(stage), partial(parity.measure_peak, trainer.device)
    parts = (7, stage.seq_len // 8, 1)
    lengths = (*parts, stage.seq_len - sum(parts))
    mask = AttentionMask(document_lengths=(lengths,))
    plans, plans_of_one = layout.plans(mask), replace(layout, make_plan=make_plan).plans(mask)
    documents = torch.repeat_interleave(torch.tensor(lengths, device=trainer.device.device)).unsqueeze(0)
    samples = ProbeSamples(trainer.data_pipeline.samples, lengths)
    trainer.data_pipeline.samples = samples  # type: ignore[assignment]

    def step(changed: int | None) -> float:
        samples.changed = changed
        (batch,) = read_step(samples, layout, 0)
        if torch.is_grad_enabled():
            return trainer.forward_backward((batch,)).loss / world.size
        trainer.model.forward(batch, trainer.model.token_loss)
        return 0.0

    def one_process(plans: Any = None) -> ModelRun:
        attention = LayerAttention() if plans else PlainAttention()
        model = parity.single_model(trainer, stage, weights, attention, torch.float32)
        native_attention = nullcontext if plans else getattr(model, "native_attention", nullcontext)

        def step(changed: int | None) -> float:
            samples.changed = changed
            with native_attention(documents):
                return parity.single_loss(trainer, layout, model, attention, plans)

        return ModelRun(model, step, lambda: parity.gradients_of(model), peak)

    with raised_weights(trainer.model.parts.parameters()):
        weights = parity.gather(trainer, lambda p: p)
        ranks = ModelRun(trainer.model.parts[0], step, lambda: parity.gather(trainer, lambda p: p.grad), peak)
        report = examine(plans[0], ranks, lambda: (one_process(), one_process(plans_of_one)), 1, [*range(world.size)])
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
