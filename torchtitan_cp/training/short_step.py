"""A short first step of a stage, on the ranks of this job and in one process, for the doctor and --verify-parity.

The one process runs the plain model without sharding, on whole sequences, with full logits in fp32: another
implementation, not ours on fewer ranks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_cp.attention import make_plan
from torchtitan_cp.attention.comparison import ModelRun
from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.contract import Attend, LanguageModel
from torchtitan_cp.config.degrees import length_unit
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.curriculum import ResolvedStage
from torchtitan_cp.data.batches.micro_batches import BatchLayout, Samples, assign_sequences, collate, read_step
from torchtitan_cp.parallel.lora import apply_lora
from torchtitan_cp.runtime.device import World
from torchtitan_cp.training import registry
from torchtitan_cp.training.model import LayerAttention, cast_parameters, set_rope
from torchtitan_cp.training.plain_attention import PlainAttention
from torchtitan_cp.training.trainer import Trainer

Name = TypeVar("Name")
PAIR_BYTES = 15  # of plain attention's masks, for each query and key; measured


def comparing_trainer(config: Config, world: World, stage_index: int | None = None) -> Trainer:
    """A trainer for comparisons, of random tokens: a model across ranks differs on any text, or on none."""
    config = config.with_keys(data={"max_epochs": {}})  # of the corpus, whose length is not known here
    return Trainer(config, world, stage_index=stage_index, trains=False, random_tokens=True)


def shorten(trainer: Trainer, stage: ResolvedStage, length: int, default: int) -> ResolvedStage:
    """The stage at a short length, with one micro-batch, or one for each pipeline rank.

    Args:
        length: of its sequences; 0: at least `default`, and what the layout can split.

    Raises:
        ConfigError: the ranks cannot share so many tokens, or the model has no positions for them.
    """
    divisor = length_unit(stage.cp, stage.tp)
    if length % divisor:
        raise ConfigError(
            f"the length {length} cannot be shared by cp = {stage.cp} and tp = {stage.tp}",
            fix=f"give a multiple of {divisor}",
        )
    registry.check_length(trainer.model.args, "the length", length)
    unit = stage.cp * stage.tp * (8 if trainer.config.context_parallel.layout == "balanced" else 2)
    seq_len = length or min(-(-default // unit) * unit, stage.seq_len)
    micro_batches = trainer.meshes.pp.size()
    tokens = seq_len * stage.dp * stage.micro_batch_sequences * micro_batches
    return replace(stage, seq_len=seq_len, micro_batches=micro_batches, global_batch_tokens=tokens)


def check_fits(trainer: Trainer, length: int = 0) -> None:
    """Refuse a model that does not fit on one rank: unsharded, with gradients and the compared copies.

    Args:
        length: tokens of the sequences that plain attention makes masks for.

    Raises:
        ConfigError: it does not fit.
    """
    copies = 5 if trainer.model.compute_dtype == torch.float32 else 7  # weights, gradients, both gathered, in 2 dtypes
    needed = trainer.model.parameter_count * 4 * copies + PAIR_BYTES * length**2
    free = trainer.device.free_memory_bytes()
    if needed > free:
        layers = "num_hidden_layers" if registry.architecture(trainer.config.model).args_of else "n_layers"
        raise ConfigError(
            f"parity needs the whole model on one rank, with masks of length², {needed / 2**30:,.0f} GiB, and "
            f"{free / 2**30:.0f} GiB are free",
            fix=f"check a slice of it, or fewer tokens: --model.overrides.{layers}=2 --model.load_weights=false",
        )


@dataclass(eq=False)
class ShortStep:
    """The first step of a stage that the trainer has entered. Collective to make.

    Args:
        trainer: its weights are compared as they are.
        stage: as `shorten` returns it.
        layout: as `Trainer.enter_stage` returned it.
        samples: (position whose token is changed in the first sequence, or None) -> the sequences.
    """

    trainer: Trainer
    stage: ResolvedStage
    layout: BatchLayout
    samples: Callable[[int | None], Samples]

    def __post_init__(self) -> None:
        self.weights = gather(self.trainer, lambda p: p)

    def on_ranks(self) -> ModelRun:
        """The step with parallelism. Collective, as its functions are."""
        trainer, model = self.trainer, self.trainer.model

        def step(changed: int | None) -> float:
            batches = read_step(self.samples(changed), self.layout, 0)
            if torch.is_grad_enabled():
                return trainer.forward_backward(batches).loss / trainer.world.size
            for batch in batches:
                model.forward(batch, model.token_loss)
            return 0.0

        def gradients() -> dict[str, Tensor]:
            gradients = gather(trainer, lambda p: p.grad)
            model.zero_grad()
            return gradients

        return ModelRun([*model.parts], step, gradients, self._measure_peak)

    def in_one_process(self, dtype: torch.dtype, attention: LayerAttention | PlainAttention | None = None) -> ModelRun:
        """The same step on this rank by itself.

        Args:
            dtype: of the weights.
            attention: of the model; None: the model's own, or plain attention where it has none.
        """
        attend = attention or PlainAttention()
        model = single_model(self.trainer, self.stage, self.weights, attend, dtype)
        native_attention = getattr(model, "native_attention", nullcontext) if attention is None else nullcontext

        def step(changed: int | None) -> float:
            return self._single_loss(model, attend, native_attention, self.samples(changed))

        def gradients() -> dict[str, Tensor]:
            found = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
            return found

        return ModelRun([model], step, gradients, self._measure_peak)

    def _single_loss(
        self,
        model: LanguageModel,
        attend: LayerAttention | PlainAttention,
        native_attention: Callable[[Tensor], AbstractContextManager[object]],
        samples: Samples,
    ) -> float:
        """The loss of the whole sequences; backward runs where gradients are enabled."""
        training, move = self.trainer.config.training, self.trainer.device.move
        numbers = assign_sequences(samples, 0, self.layout).flatten().tolist()
        weighted = training.loss_normalization == "conversation"
        batch = collate(samples.sequence, replace(self.layout, make_plan=make_plan, weighted=weighted), numbers)
        lengths = (torch.tensor(samples.document_lengths(number)) for number in numbers)
        documents = move(
            torch.stack([torch.repeat_interleave(each) for each in lengths])
        )  # a document's number, [B, S]
        tokens, labels, positions = (move(x) for x in (batch.tokens, batch.labels, batch.positions))
        weights = (labels != IGNORED).float() if batch.weights is None else move(batch.weights)
        divisor = weights.double().sum() or 1.0
        if training.loss_normalization == "batch_tokens":
            divisor = labels.numel()
        attend.step_tokens = torch.tensor(labels.numel(), device=labels.device)

        def head(hidden: Tensor, output: nn.Linear) -> Tensor:
            logits = output(hidden).float().flatten(0, 1)
            losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")
            squares = logits.logsumexp(-1).square()
            return torch.stack([(x * weights.flatten()).sum() for x in (losses, squares)])

        plans: Any = batch.plans if isinstance(attend, LayerAttention) else documents
        with native_attention(documents):
            loss, z_loss = model(tokens, positions.expand_as(tokens), plans, head) / divisor
            if torch.is_grad_enabled():
                (loss + training.z_loss * z_loss).backward()
        return float(loss.item())

    def _measure_peak(self) -> Callable[[], int]:
        """Start measuring memory. The returned function gives the peak beyond what was held before, in bytes."""
        device = self.trainer.device
        device.reset_peak_memory()
        before = device.peak_memory_bytes()
        return lambda: device.peak_memory_bytes() - before


def single_model(
    trainer: Trainer, stage: ResolvedStage, weights: dict[str, Tensor], attention: Attend, dtype: torch.dtype
) -> LanguageModel:
    """The whole model on this rank, with these weights and this attention."""
    args, device = trainer.model.args, trainer.device.device
    model = registry.architecture(trainer.config.model).build(args, attention)
    if trainer.config.lora:
        apply_lora(model, trainer.config.lora)
    model.load_state_dict(weights, strict=False)
    cast_parameters(model.to(device), dtype)
    set_rope(model, args, stage.rope, stage.seq_len, device)
    return model


def gather(trainer: Trainer, get: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """`get` of each parameter and buffer, gathered from all ranks, fp32 on the host. Collective."""
    parts = trainer.model.parts
    local = {name: get(x) for part in parts for name, x in (*part.named_parameters(), *part.named_buffers())}
    # NCCL gathers tensors on the GPU only, and offloaded ones are on the host.
    on_device = {name: x.to(trainer.device.device) for name, x in local.items() if x is not None}
    full = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in on_device.items()}
    return gather_pipeline(trainer, {name: x.detach().float().cpu() for name, x in full.items()})


def gather_pipeline(trainer: Trainer, tensors: dict[Name, Tensor]) -> dict[Name, Tensor]:
    """Tensors by name from all pipeline ranks. Collective."""
    if trainer.model.pipeline is None:
        return tensors
    by_rank = [tensors] * trainer.model.pipeline.ranks
    dist.all_gather_object(by_rank, tensors, group=trainer.model.pipeline.group)
    return {name: x for part in by_rank for name, x in part.items()}
