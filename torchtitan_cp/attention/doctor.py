"""Whether a model is safe under context parallelism: compares the ranks with one process, to the first difference.

The same sequence runs on one process with the model's own attention (`plain`), on one process through our attention
(`attend`), and on the ranks. We record the inputs and outputs of every module, and every attention call that reaches
us. In some runs our attention returns its values v: a module that still mixes tokens then does so outside of it.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from torchtitan_cp.attention.api import ContextParallel, make_plan, sum_ranks
from torchtitan_cp.attention.comparison import ModelRun, on_rank_0, record_step
from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.faults import Findings, Report
from torchtitan_cp.attention.local_shard import local_tensor
from torchtitan_cp.attention.mask import AttentionMask
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.recording import ModuleTrace, gather_modules, record_modules
from torchtitan_cp.attention.sdpa_context import context_parallel

# Small weights are raised to this standard deviation, times fan-in ** -0.5. With fresh weights, scores are so small
# that a soft cap or a scale hardly shows.
RAISED_STD = 2.0


def examine(
    plan: Plan, ranks: ModelRun, single: Callable[[], tuple[ModelRun, ModelRun]], sequences: int, order: list[int]
) -> Report:
    """Run the model in all ways and compare. Collective over all ranks of the job.

    Args:
        plan: this rank's, with the documents of the sequences and no window.
        ranks: runs the model on the ranks.
        single: called on rank 0; returns (plain, attend).
        sequences: B.
        order: ranks of the job, in the order of the plan's group.
    """
    length = plan.sequence_length
    start, stop = max(plan.mask.documents(length)[0], key=lambda span: span[1] - span[0])
    changes = sorted({max(start - 1, 0), start, (start + stop) // 2})

    def trace(run: ModelRun, changed: int | None = None, *, own_values: bool = False) -> ModuleTrace:
        tokens, gather = length, None
        if run is ranks:
            tokens, gather = plan.local_tokens, partial(gather_modules, plan=plan, ranks=order)
        record = partial(record_modules, sequences=sequences, tokens=tokens, own_values=own_values)
        return record_step(run, record, gather, changed)

    traces = {"ranks": trace(ranks)}
    with torch.no_grad():
        if not traces["ranks"].error:
            traces |= {"ranks, own values": trace(ranks, own_values=True)}
            traces |= {f"ranks, {token}": trace(ranks, token) for token in changes}

    def report() -> Report:
        plain, attend = single()
        traces["plain"] = trace(plain)
        with torch.no_grad():
            traces["attend"] = trace(attend, own_values=True)
            traces["attend, changed"] = trace(attend, start, own_values=True)
            traces.update({f"plain, {token}": trace(plain, token) for token in changes})
        return Findings(plan, plain.parts[0], traces, changes).report()

    return on_rank_0(report)


@contextmanager
def raised_weights(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Scale small weights up by powers of two, and exactly back at the end."""
    raised: list[tuple[Tensor, float]] = []
    for p in (p.detach() for p in parameters if p.ndim > 1):
        weight, target = local_tensor(p), RAISED_STD * p.shape[-1] ** -0.5
        rms = max(weight.float().norm().item(), 1e-9) / max(weight.numel(), 1) ** 0.5
        raised.append((weight, 2.0 ** max(0, round(math.log2(target / rms)))))
        weight.mul_(raised[-1][1])
    try:
        yield
    finally:
        for weight, factor in raised:
            weight.div_(factor)


Step = Callable[[nn.Module, dict[str, Tensor], ContextParallel | None], Tensor]


def doctor(
    model: nn.Module,
    cp: ContextParallel,
    batch: Mapping[str, Tensor],
    mask: AttentionMask | None = None,
    step: Step | None = None,
) -> Report:
    """Say whether a module is safe under context parallelism, or what is wrong with it. Collective over the mesh.

    Args:
        model: a plain module in fp32, with the same weights on every rank. Its weights and buffers are unchanged
            afterwards; gradients are dropped.
        cp: over all ranks of the job.
        batch: whole tensors by name, the same on every rank. The first is the tokens, `[B, S]`, or hidden states
            `[B, S, E]`; some runs change one token.
        mask: what may attend to what, with the documents of a packed batch; default causal.
        step: (model, batch, cp) -> loss. A forward, and a backward if `torch.is_grad_enabled()`, as your training
            does it. With a cp it takes the whole batch and returns this rank's share of the loss; the shares add up to
            the loss of one process. With None it runs the whole sequence in one process. By default it calls
            `model(**batch)` within `context_parallel`, which returns the loss or an object that has a `loss`.

    Raises:
        PlanError: the batch holds no tokens.
    """
    tokens, mask = next(iter(batch.values()), torch.empty(0)), mask or AttentionMask()
    if tokens.ndim < 2 or not tokens.numel():
        raise PlanError("the batch holds no tokens", fix="put them first, [B, S], or hidden states, [B, S, E]")
    plan, run_step = cp.plan(tokens.shape[1], mask), step or partial(_step, mask=mask)
    single_cp = copy.copy(cp)
    single_cp.make_plan = partial(make_plan, kernel=cp.kernel)

    def model_run(cp: ContextParallel | None) -> ModelRun:
        def run(changed: int | None) -> Tensor:
            copies = {name: x.clone() for name, x in batch.items()}
            if changed is not None:
                row = next(iter(copies.values()))[0]
                row[changed] = row[changed] + 1 if row.is_floating_point() else (row[changed] + 1) % (row.max() + 1)
            return run_step(model, copies, cp)

        def gradients() -> dict[str, Tensor]:
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
            return {name: (sum_ranks(x, plan) if cp else x).cpu() for name, x in gradients.items()}

        return ModelRun([model], run, gradients, _measure_peak)

    model.zero_grad()
    buffers, order = [(buffer, buffer.clone()) for buffer in model.buffers()], cp.mesh.mesh.flatten().tolist()
    try:
        with raised_weights(model.parameters()):
            return examine(plan, model_run(cp), lambda: (model_run(None), model_run(single_cp)), len(tokens), order)
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)


def _step(model: nn.Module, batch: dict[str, Tensor], cp: ContextParallel | None, mask: AttentionMask) -> Tensor:
    """The default step of `doctor`."""
    length = next(iter(batch.values())).shape[1]
    with ExitStack() as stack:
        if cp:
            dims = [(x, 0 if x.ndim == 1 else 1) for x in batch.values()]
            buffers, buffer_dims = zip(*((x, dim) for x, dim in dims if x.shape[dim] == length), strict=True)
            stack.enter_context(context_parallel(cp, buffers, buffer_dims, mask=mask, model=model))
        out = model(**batch)
        loss = out if isinstance(out, Tensor) else out.loss
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()


def _measure_peak() -> Callable[[], int]:
    """Start measuring a GPU's memory. The returned function gives the peak since then; 0 without a GPU."""
    if not torch.cuda.is_available():
        return lambda: 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return lambda: torch.cuda.max_memory_allocated() - before
