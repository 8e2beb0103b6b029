"""Whether a model is safe under context parallelism: compares the ranks with one process, to the first difference.

The same sequence runs on one process with the model's own attention (`plain`), on one process through our attention
(`attend`), and on the ranks. We record the inputs and outputs of every module, and every attention call that reaches
us. In some runs our attention returns its values v: a module that still mixes tokens then does so outside of it.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_cp.attention.api import ContextParallel, attend, make_plan, sum_ranks
from torchtitan_cp.attention.errors import PlanError
from torchtitan_cp.attention.local_shard import local_tensor
from torchtitan_cp.attention.mask import AttentionMask
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.recording import CallInfo, Event, ModelRun, Trace, gather_trace, record, sketch
from torchtitan_cp.attention.sdpa_context import context_parallel

TOLERANCE = 1e-3  # a larger relative L2 difference is more than rounding in fp32
CHANGED = 5e-6  # of the largest entry: a row that changes by more depends on the changed token
# Small weights are raised to this standard deviation, times fan-in ** -0.5. With fresh weights, scores are so small
# that a soft cap or a scale hardly shows.
RAISED_STD = 2.0
LEAK, OTHER = "documents leaking", "another computation"
HEADERS = ("layer", "class", "heads", "dims", "scale", "window", "soft cap", "sinks", "across ranks")


@dataclass(frozen=True)
class Report:
    """What the doctor found: the name of the fault ("": the model is safe), and the whole report."""

    fault: str
    text: str


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
    length, found = plan.sequence_length, list[Any]([None])
    start, stop = max(plan.mask.documents(length)[0], key=lambda span: span[1] - span[0])
    changes = sorted({max(start - 1, 0), start, (start + stop) // 2})

    def on_ranks(**options: Any) -> Trace:
        return gather_trace(record(ranks, sequences, plan.local_tokens, **options), plan, order)

    traces = {"ranks": on_ranks()}
    gradients = {} if traces["ranks"].error else ranks.gradients()
    with torch.no_grad():
        if not traces["ranks"].error:
            traces |= {"ranks, own values": on_ranks(own_values=True)}
            traces |= {f"ranks, {token}": on_ranks(changed=token) for token in changes}
    if dist.get_rank() == 0:
        plain, attend_run = single()
        traces["plain"], by_ranks = record(plain, sequences, length), by_layer(gradients)
        errors = {layer: difference(by_ranks.get(layer), want) for layer, want in by_layer(plain.gradients()).items()}
        with torch.no_grad():
            traces["attend"] = record(attend_run, sequences, length, own_values=True)
            traces["attend, changed"] = record(attend_run, sequences, length, start, own_values=True)
            traces |= {f"plain, {token}": record(plain, sequences, length, token) for token in changes}
        found = [_Comparison(plan, plain.model, traces, changes, errors).report()]
    dist.broadcast_object_list(found)
    return found[0]


@dataclass
class _Comparison:
    """What follows from the traces of all runs, by name, and the differences of gradients, by layer."""

    plan: Plan
    model: nn.Module
    traces: dict[str, Trace]
    changes: list[int]
    gradient_errors: dict[str, float]

    def report(self) -> Report:
        """The table, the probes and the verdict."""
        ranks, plain = self.traces["ranks"], self.traces["plain"]
        cells = [HEADERS, *(self._cells(layer, call) for layer, call in ranks.calls.items())]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        lines += [f"tokens are mixed outside of attention in: {', '.join(self._mixers()) or 'no layer'}"]
        for token in self.changes:
            single, many = (_describe(self._changed(run, token)) for run in ("plain", "ranks"))
            bound = f" (a position counts if it changes by {CHANGED:g} of the largest number)" * (single != many)
            lines += [f"token {token} changed: with it {single} on one process, {many} on the ranks{bound}"]
        lines += [f"gradients, {layer}: relative difference {x:.1e}" for layer, x in self.gradient_errors.items()]
        lines += [f"loss: {plain.loss:.6f} on one process, {ranks.loss:.6f} on the ranks"]
        peaks = [f"{trace.peak_bytes / 2**20:,.0f} MiB" for trace in (plain, ranks)]
        lines += [f"peak memory of the step: {peaks[0]} on one process, {peaks[1]} a rank"]
        fault, layer, evidence = next(self._faults(), ("", "", ""))
        where = f"{layer} ({self._class_of(layer)})" if layer else self._class_of(layer)
        verdict = f"NOT SAFE: {fault}: {where}: {evidence}" if fault else "safe: nothing differs"
        return Report(fault, "\n".join([*lines, verdict]))

    def _cells(self, layer: str, call: CallInfo) -> list[str]:
        """A row of the table."""
        exchange = "state" if call.recurrent else f"attend {call.plan.strategy}"
        across_ranks = f"{exchange}, {call.plan.ranks} ranks"
        options = (f"{call.scale:.4g}", call.plan.mask.window[0] + 1, call.softcap, call.sinks is not None)
        sizes = ("/".join(map(str, pair)) for pair in (call.heads, call.dims))
        return [layer, self._class_of(layer), *sizes, *(str(option or "-") for option in options), across_ranks]

    def _faults(self) -> Iterator[tuple[str, str, str]]:
        """Yields (fault, layer, evidence), causes before their effects."""
        ranks, plain, local = self.traces["ranks"], self.traces["plain"], self.plan.local_tokens
        attend_trace, mixers = self.traces["attend"], self._mixers()
        first, tokens = ranks.first or ("", local)
        if tokens != local:
            cut = "sharded twice" if tokens * self.plan.ranks == local else "that is not sharded"
            yield f"a sequence {cut}", first, f"it gives {tokens:g} tokens on a rank, and a shard has {local}"
        if mixers:
            attends = any(f"{name}.".startswith(f"{mixers[0]}.") for name in attend_trace.attending)
            fault = "an attention that never reaches us" if attends else "a recurrence or convolution"
            yield fault, mixers[0], "it moves information between tokens, and nothing carries that across ranks"
        if error := ranks.error or plain.error:
            yield "refused", next(reversed(ranks.calls), ""), error
            return
        if event := _first_difference(self.traces["ranks, own values"].events, attend_trace.events):
            evidence = "its output on a shard differs from the whole sequence's, though no token reaches another"
            yield "positions counted by the model itself", _owner(event), evidence
        if event := _first_difference(ranks.events, plain.events):
            layer = _owner(event)
            call = ranks.calls.get(layer)
            fault, evidence = OTHER, "its output differs"
            if call and not call.recurrent:
                fault, evidence = self._explain(call, layer, plain.events[event])
            yield fault, layer, evidence
        if abs(ranks.loss - plain.loss) > TOLERANCE * abs(plain.loss):
            sums = f"the ranks' shares sum to {ranks.loss:.6f} and one process has {plain.loss:.6f}"
            evidence = f"no layer differs, but {sums}: divide each rank's sum by the tokens of all ranks"
            yield "a loss averaged by shard", "", evidence
        for layer, gradient_error in self.gradient_errors.items():
            if gradient_error > TOLERANCE:
                yield OTHER, layer, f"its gradients differ by {gradient_error:.1e}"
        for token in self.changes:
            stop = next(stop for _, stop in self.plan.mask.documents(self.plan.sequence_length)[0] if token < stop)
            for run in ("plain", "ranks"):
                if self._changed(run, token)[stop:].any():
                    yield LEAK, "", f"token {token} changes positions beyond its document's end at {stop} ({run})"
        if attend_trace.error:
            yield "refused", next(reversed(attend_trace.calls), ""), attend_trace.error

    def _class_of(self, layer: str) -> str:
        return type(self.model.get_submodule(layer)).__name__

    def _mixers(self) -> list[str]:
        """The first module that moves information between tokens outside of our attention, then others of its class."""
        before, after = self.traces["attend"].events, self.traces["attend, changed"].events
        for event in before:
            if _changed_rows(after.get(event), before[event]).sum() > 1:
                first = _owner(event)
                names = [
                    name for name, _ in self.model.named_modules() if self._class_of(name) == self._class_of(first)
                ]
                return sorted(names, key=lambda name: name != first)
        return []

    def _changed(self, run: str, token: int) -> Tensor:
        """Positions of the first sequence whose last recorded numbers depend on a token, `[S]`."""
        before, after = self.traces[run].events, self.traces.get(f"{run}, {token}", Trace()).events
        last = next((key for key in reversed(self.traces["plain"].events) if key in before and key in after), None)
        return _changed_rows(after[last], before[last]) if last else torch.zeros(self.plan.sequence_length).bool()

    def _explain(self, call: CallInfo, layer: str, want: Tensor) -> tuple[str, str]:
        """(fault, evidence): the option of a call whose change makes it agree best with one process, `want`."""
        events, length, call_mask = self.traces["ranks"].events, self.plan.sequence_length, call.plan.mask
        q, k, v = (events[layer, name] for name in "qkv")
        call_options: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "sinks": call.sinks}

        def output(mask: Any = call_mask, window: Any = 0, **options: Any) -> Tensor:
            plan = make_plan(length, mask=mask.windowed(round(window)), kernel="reference")
            return sketch(attend(q, k, v, plan, **(call_options | options)).flatten(2))

        def error(**changed: Any) -> float:
            return difference(output(**changed), want)

        documents = replace(call_mask, document_lengths=self.plan.mask.document_lengths)
        together = replace(call_mask, document_lengths=None, used_lengths=None)
        tried = [
            (error(), "an exchange that loses keys", "its options are right, but the ranks' output differs"),
            (error(mask=documents), LEAK, "one process keeps documents apart"),
            (error(mask=together), LEAK, "the ranks keep documents apart, and one process does not"),
        ]
        # A query of the first chunk loses nothing, so the first that differs begins the second.
        if chunk := int(_changed_rows(output(), want, TOLERANCE).int().argmax()):
            evidence = f"one process attends within chunks of {chunk} tokens, the ranks beyond them"
            tried.append((error(mask=_chunked(call_mask, length, chunk)), "chunks lost", evidence))
        for p in self.model.get_submodule(layer).parameters():
            if p.shape == q.shape[2:3]:
                tried.append((error(sinks=p.detach().cpu()), "a sink lost", "one process has a sink for each head"))
        on_ranks = {"window": call_mask.window[0] + 1, **call_options}
        for fault, option, low, high in (
            ("a window lost", "window", 1.0, float(length)),
            ("a dropped attention scale", "scale", 1e-4, 16.0),
            ("a soft cap lost", "softcap", 0.1, 1e3),
        ):
            value = _fit(lambda value: error(**{option: value}), low, high)  # noqa: B023
            value = round(value) if option == "window" else value
            evidence = f"one process has {value:.4g}, the ranks {on_ranks[option]:.4g}"
            tried.append((error(**{option: value}), fault, evidence))
        least, fault, evidence = min(tried)
        if least < 10 * TOLERANCE:
            return fault, evidence
        return OTHER, "no single option of its attention explains the difference"


def _fit(error: Callable[[float], float], low: float, high: float) -> float:
    """The number between two with the least error, by ever finer logarithmic grids."""
    for _ in range(6):
        grid = torch.logspace(math.log10(low), math.log10(high), 17).tolist()
        best = min(range(17), key=lambda index: error(grid[index]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 16)]
    return float(grid[best])


def difference(got: Tensor | None, want: Tensor) -> float:
    """Relative L2 difference; infinite where a number or a shape is wrong."""
    if got is None or got.shape != want.shape:
        return math.inf
    error = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
    return math.inf if math.isnan(error) else error


def by_layer(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One vector per layer. A layer's name goes up to its number, or up to the first dot."""
    layers: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        numbered = re.match(r"(.*?\.\d+)\.|([^.]*)", name)
        layers.setdefault(numbered[0].rstrip("."), []).append(gradient.flatten())  # type: ignore[index]
    return {layer: torch.cat(parts) for layer, parts in layers.items()}


def _chunked(mask: AttentionMask, length: int, chunk: int) -> AttentionMask:
    """A mask whose documents are cut into chunks."""
    rows = mask.document_lengths or ((length,),)
    cut = (tuple(min(chunk, size - start) for size in row for start in range(0, size, chunk)) for row in rows)
    return replace(mask, document_lengths=tuple(cut), used_lengths=None)


def _changed_rows(got: Tensor | None, base: Tensor, tolerance: float = CHANGED) -> Tensor:
    """Which positions of the first sequence differ by more than `tolerance` of the largest number, `[S]`."""
    if got is None or got.shape != base.shape:
        return torch.zeros(base.shape[1], dtype=torch.bool)
    return (got[0] - base[0]).abs().flatten(1).amax(-1) > tolerance * base[0].abs().max()


def _first_difference(got: Mapping[Event, Tensor], want: Mapping[Event, Tensor]) -> Event | None:
    """The first event in both traces that differs."""
    return next((key for key in want if key in got and difference(got[key], want[key]) > TOLERANCE), None)


def _owner(event: Event) -> str:
    """The module that computed the values of an event: the inputs of a module come from its parent."""
    name, side = event
    return name.rpartition(".")[0] if side.startswith("in") else name


def _describe(positions: Tensor) -> str:
    """The number of marked positions, and their range."""
    numbers = positions.nonzero().flatten().tolist()
    return f"{len(numbers)} positions from {numbers[0]} to {numbers[-1]}" if numbers else "no position"


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

        return ModelRun(model, run, gradients, _measure_peak)

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
