"""Faults that tests make on purpose in a Trainer: detection, diagnosis and recovery treat them as real ones."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.runs import prepared, run_to_end
from torchtitan_cp.checkpoint.progress import Progress
from torchtitan_cp.cli.replay import build
from torchtitan_cp.config import ConfigError
from torchtitan_cp.health.diagnosis import Diagnosis, Event
from torchtitan_cp.health.monitor import StepReport
from torchtitan_cp.health.recovery import RecoveryState
from torchtitan_cp.health.replay import Bundle, replay
from torchtitan_cp.training.trainer import Trainer

logger = logging.getLogger(__name__)

SPIKE = 1e4


@dataclass(frozen=True)
class Inject:
    """A fault.

    Attributes:
        step: optimizer step that gets the fault, from 1; 0: none.
        steps: number of steps in a row that get it.
        rank: rank that gets it.
        where: data: an out-of-range label; embedding, forward: a module's output; backward: the gradient of its input;
            gradient: a weight's gradient, before the ranks' sum; weight: a weight itself.
        layer: forward, backward, gradient, weight: number of the block.
        module: forward to weight: a module in the block by name, e.g. feed_forward.w2; empty: the block.
        parameter: gradient, weight: the module's parameter by name; empty: its first.
        kind: nan, inf: one value becomes it; spike: all become 10,000 times as large.
        transient: the fault is gone when the step is repeated, as after a flipped bit.
    """

    step: int = 0
    steps: int = 1
    rank: int = 0
    where: str = "forward"
    layer: int = 0
    module: str = ""
    parameter: str = ""
    kind: str = "nan"
    transient: bool = False


def inject(trainer: Trainer, fault: Inject | None = None) -> None:
    """On all ranks: make this fault in the trainer's steps from now on, and no other."""
    runner, model = trainer.step_runner, trainer.model
    vars(runner).pop("compute_gradients", None), vars(runner).pop("diagnose", None)
    compute, diagnose = runner.compute_gradients, runner.diagnose
    repeat = runner._repeat
    injector = Injector(fault or Inject(), model.parts, model.args.vocab_size, model.reads_same_batch_as)

    def faulty_run(progress: Progress, micro_batches: Any) -> StepReport:
        with injector.fault(progress.step + 1):
            return compute(progress, injector.corrupt(progress.step + 1, micro_batches))

    def faulty_diagnose(step: int, report: StepReport, micro_batches: Any, state: RecoveryState) -> Diagnosis:
        def faulty_repeat(micro_batches: Any, within: AbstractContextManager[Any]) -> StepReport:
            usual = micro_batches is runner.healthy_batches
            with nullcontext() if usual else injector.fault(step, again=True):
                return repeat(micro_batches, within)

        runner.diagnoser = replace(runner.diagnoser, run_step=faulty_repeat)
        return diagnose(step, report, injector.corrupt(step, micro_batches, again=True), state)

    runner.compute_gradients, runner.diagnose = faulty_run, faulty_diagnose  # type: ignore[method-assign]


def replay_with_fault(folder: Path, fault: Inject, module: str = "") -> Event | None:
    """Replay a bundle, and make the fault again in the module of this name; default: the culprit."""
    bundle = Bundle.read(folder)
    with ExitStack() as faults:

        def build_with_fault(bundle: Bundle) -> nn.Module:
            built = build(bundle)
            by_name = dict(built.named_modules(prefix=bundle.report["module"]))
            faults.enter_context(fault_in(by_name[module or bundle.report["culprit"]["module"]], fault))
            return built

        return replay(bundle, build_with_fault)


class Injector:
    """Makes a fault in the steps it names, and does nothing in the others. Collective to make.

    Args:
        settings: the fault.
        parts: the model's modules on this rank.
        vocabulary: V; ids from V on are not tokens.
        reads_same_batch_as: whether a rank reads the same tokens as this one.

    Attributes:
        name: name of the module that gets the fault; module: the module itself, None if this rank does not have it.

    Raises:
        ConfigError: on all ranks, if the rank does not have the module, or the module has no weight to corrupt.
    """

    def __init__(
        self, settings: Inject, parts: Any, vocabulary: int, reads_same_batch_as: Callable[[int], bool]
    ) -> None:
        self.settings, self.vocabulary, self.reads_same_batch_as = settings, vocabulary, reads_same_batch_as
        # The last part may hold the embedding too, for the tied weight of its output, but only the first part runs it.
        modules: dict[str, nn.Module] = {}
        for part in parts:
            if part.is_first:
                modules["tok_embeddings"] = part.tok_embeddings
            for number, layer in part.layers.items():
                modules |= dict(layer.named_modules(prefix=f"layers.{number}"))
        in_block = ".".join(filter(None, ("layers", str(settings.layer), settings.module)))
        self.name = "tok_embeddings" if settings.where == "embedding" else in_block
        self.module = modules.get(self.name)
        if settings.step and settings.where != "data":
            if settings.where in ("gradient", "weight"):
                modules = {name: module for name, module in modules.items() if _weight_name(module)}
            known = [list(modules)]
            dist.broadcast_object_list(known, settings.rank)
            if self.name not in known[0]:
                raise ConfigError(
                    f"rank {settings.rank} has no module {self.name} for where = {settings.where!r}; "
                    f"it has {', '.join(known[0])}",
                    fix="name a rank, layer and module that exist",
                )

    def is_due(self, step: int, *, again: bool = False) -> bool:
        """Whether the step gets the fault, in its first run or when it is run again."""
        settings = self.settings
        return 0 < settings.step <= step < settings.step + settings.steps and not (again and settings.transient)

    def fault(self, step: int, *, again: bool = False) -> AbstractContextManager[None]:
        """Make the fault in the modules that run within this context, if it is due in this step and on this rank."""
        settings, due = self.settings, self.is_due(step, again=again)
        if due and not again and dist.get_rank() == 0:
            logger.warning("FAULT INJECTED on purpose in step %d: %s", step, asdict(settings))
        if not due or settings.rank != dist.get_rank() or settings.where == "data" or self.module is None:
            return nullcontext()
        # The hook of a whole block runs before its other hooks, which have to see the fault; the hook of a smaller
        # module runs after the hooks of tensor parallelism.
        whole_block = settings.where != "embedding" and not settings.module
        return fault_in(self.module, settings, prepend=whole_block)

    def corrupt(self, step: int, micro_batches: Sequence[Any], *, again: bool = False) -> tuple[Any, ...]:
        """The micro-batches of a step; if a fault with where = "data" is due, it is in the labels of the first.

        For NaN and infinity, one label is outside the vocabulary, which makes its loss infinite. For a spike, every
        label becomes another token.
        """
        settings, (first, *others) = self.settings, micro_batches
        if settings.where == "data" and self.is_due(step, again=again) and self.reads_same_batch_as(settings.rank):
            labels = first.labels.clone()
            if settings.kind == "spike":
                labels = torch.where(labels < 0, labels, (labels + self.vocabulary // 2) % self.vocabulary)
            else:
                labels[0, labels.shape[1] // 2] = self.vocabulary + 1
            first = replace(first, labels=labels)
        return first, *others


def _weight_name(module: nn.Module) -> str | None:
    """Name of the module's first parameter, not counting those of its children; None if it has none."""
    return next((name for name, _ in module.named_parameters(recurse=False)), None)


@contextmanager
def fault_in(module: nn.Module, settings: Inject, *, prepend: bool = False) -> Iterator[None]:
    """Corrupt the first output, gradient or weight of a module that the settings name.

    Args:
        prepend: run before the other hooks of the module.
    """
    weight_name = settings.parameter or str(_weight_name(module))

    def corrupted(x: Tensor) -> Tensor:
        return corrupt_(x.clone(), settings.kind)

    def corrupt_output(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        hook.remove()
        return (corrupted(output[0]), *output[1:]) if isinstance(output, tuple) else corrupted(output)

    def corrupt_gradient(module: nn.Module, inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inputs
        hook.remove()
        if settings.where == "backward":
            # The gradient of a view comes from this module alone; that of the tensor also from the residual stream.
            x = inputs[0].view_as(inputs[0])
            inputs = (x, *inputs[1:])
        else:
            # During the forward this is the gathered weight, whose gradient is not yet summed over ranks.
            x = getattr(module, weight_name)
        hooks.enter_context(x.register_hook(corrupted))
        return inputs

    with ExitStack() as hooks:
        if settings.where == "weight":
            corrupt_(getattr(module, weight_name), settings.kind)
        elif settings.where in ("backward", "gradient"):
            hook = hooks.enter_context(module.register_forward_pre_hook(corrupt_gradient, prepend=prepend))
        else:
            hook = hooks.enter_context(module.register_forward_hook(corrupt_output, prepend=prepend))
        yield


@torch.no_grad()
def corrupt_(x: Tensor, kind: str) -> Tensor:
    """Make the middle value of a tensor (of this rank's shard) NaN or infinite, or all values large, in place."""
    local, tp_rank, tp_ranks = x, 0, 1
    if isinstance(x, DTensor):
        local = x.to_local()
        if x.device_mesh.ndim == 1 and x.placements[0].is_replicate():
            # Each tensor-parallel rank uses only its own share of the tokens of a replicated tensor.
            tp_rank, tp_ranks = x.device_mesh.get_local_rank(), x.device_mesh.size()
    if kind == "spike":
        local.mul_(SPIKE)
    elif local.numel():
        first, *others = (size // 2 for size in local.shape)
        if others:
            others[0] = local.shape[1] * (2 * tp_rank + 1) // (2 * tp_ranks)
        local[(first, *others)] = float(kind)
    return x


def train_with_fault(fault: Inject, path: Path, *overrides: str) -> list[dict[str, Any]]:
    """On a rank: run a config to the end with this fault; the lines of metrics.jsonl."""
    trainer = prepared(path, *overrides)
    inject(trainer, fault)
    return run_to_end(trainer)
