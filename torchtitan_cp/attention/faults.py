"""Names the first fault that the traces of a model on ranks and in one process show, with its layer and evidence."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_cp.attention.api import attend, make_plan
from torchtitan_cp.attention.comparison import GRADIENTS, LOSS, Quantity, Row, compare, describe_peaks, difference
from torchtitan_cp.attention.mask import AttentionMask
from torchtitan_cp.attention.plan import Plan
from torchtitan_cp.attention.recording import CallInfo, ModuleTrace, sketch

TOLERANCE = 1e-3  # a larger relative L2 difference is more than rounding in fp32
CHANGED = 5e-6  # of the largest entry: a row that changes by more depends on the changed token
LEAK, OTHER = "documents leaking", "another computation"
HEADERS = ("layer", "class", "heads", "dims", "scale", "window", "soft cap", "sinks", "across ranks")


@dataclass(frozen=True)
class Report:
    """What the doctor found: the name of the fault ("": the model is safe), and the whole report."""

    fault: str
    text: str


@dataclass
class Findings:
    """What follows from the traces of all runs.

    Attributes:
        plan: with the documents of the sequences and no window.
        model: of one process.
        traces: by name: "ranks", "plain" and "attend", as `examine` calls the ways to run the model; after a comma,
            which own values or changed token.
        changes: positions of the changed tokens.
    """

    plan: Plan
    model: nn.Module
    traces: dict[str, ModuleTrace]
    changes: list[int]

    @cached_property
    def rows(self) -> dict[Quantity, Row]:
        """The ranks beside one process with the model's own attention."""
        return compare(self.traces["ranks"].quantities, self.traces["plain"].quantities, TOLERANCE)

    def report(self) -> Report:
        """The table, the probes and the verdict."""
        ranks, plain = self.traces["ranks"], self.traces["plain"]
        mixing = (name for name, _ in self.model.named_modules() if name in ranks.calls or name in ranks.convolving)
        cells = [HEADERS, *(self._cells(layer, ranks.calls.get(layer)) for layer in mixing)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        lines += [f"tokens are mixed outside of attention in: {', '.join(self._mixers()) or 'no layer'}"]
        for token in self.changes:
            single, many = (_describe(self._changed(run, token)) for run in ("plain", "ranks"))
            bound = f" (a position counts if it changes by {CHANGED:g} of the largest number)" * (single != many)
            lines += [f"token {token} changed: with it {single} on one process, {many} on the ranks{bound}"]
        gradients = (row for (_, kind), row in self.rows.items() if kind == GRADIENTS)
        lines += [f"{row.quantity}: relative difference {row.difference:.1e}" for row in gradients]
        lines += [f"loss: {plain.loss:.6f} on one process, {ranks.loss:.6f} on the ranks"]
        lines += [describe_peaks(plain.peak_bytes, ranks.peak_bytes)]
        fault, layer, evidence = next(self._faults(), ("", "", ""))
        where = f"{layer} ({self._class_of(layer)})" if layer else self._class_of(layer)
        verdict = f"NOT SAFE: {fault}: {where}: {evidence}" if fault else "safe: nothing differs"
        return Report(fault, "\n".join([*lines, verdict]))

    def _cells(self, layer: str, call: CallInfo | None) -> list[str]:
        """A row of the table, of a layer with an attention call, or with a convolution alone."""
        if not call:
            return [layer, self._class_of(layer), *"-" * 6, f"convolution, {self.plan.ranks} ranks"]
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
        own_values = self.traces["ranks, own values"].events
        if event := _first_apart(compare(own_values, attend_trace.events, TOLERANCE), own_values):
            evidence = "its output on a shard differs from the whole sequence's, though no token reaches another"
            yield "positions counted by the model itself", _owner(event), evidence
        if event := _first_apart(self.rows, ranks.events):
            layer = _owner(event)
            call = ranks.calls.get(layer)
            fault, evidence = OTHER, "its output differs"
            if call and not call.recurrent:
                fault, evidence = self._explain(call, layer, plain.events[event])
            elif call or layer in ranks.convolving:
                fault, evidence = self._explain_state(ranks.events[event], plain.events[event])
            yield fault, layer, evidence
        if not self.rows[LOSS].holds:
            sums = f"the ranks' shares sum to {ranks.loss:.6f} and one process has {plain.loss:.6f}"
            evidence = f"no layer differs, but {sums}: divide each rank's sum by the tokens of all ranks"
            yield "a loss averaged by shard", "", evidence
        for (layer, kind), row in self.rows.items():
            if kind == GRADIENTS and not row.holds:
                yield OTHER, layer, f"its gradients differ by {row.difference:.1e}"
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
        before, after = self.traces[run].events, self.traces.get(f"{run}, {token}", ModuleTrace()).events
        last = next((key for key in reversed(self.traces["plain"].events) if key in before and key in after), None)
        return _changed_rows(after[last], before[last]) if last else torch.zeros(self.plan.sequence_length).bool()

    def _explain_state(self, got: Tensor, want: Tensor) -> tuple[str, str]:
        """(fault, evidence) for a layer with a convolution or recurrence, from the first token that differs."""
        token = int(_changed_rows(got, want, TOLERANCE).int().argmax())
        evidence = f"its output differs from token {token} on"
        if token and any(token == start for start, _ in self.plan.mask.documents(self.plan.sequence_length)[0]):
            return LEAK, f"{evidence}, where a document begins"
        if token and any(token == start for spans in self.plan.layout.spans for start, _ in spans):
            return "a state lost between ranks", f"{evidence}, where the tokens of another rank begin"
        return OTHER, evidence

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


def _first_apart(rows: Mapping[Quantity, Row], events: Mapping[Quantity, Tensor]) -> Quantity | None:
    """The first of these events that differs; those that only one process has are passed over."""
    return next((event for event, row in rows.items() if event in events and not row.holds), None)


def _owner(event: Quantity) -> str:
    """The module that computed the values of an event: the inputs of a module come from its parent."""
    name, side = event
    return name.rpartition(".")[0] if side.startswith("in") else name


def _describe(positions: Tensor) -> str:
    """The number of marked positions, and their range."""
    numbers = positions.nonzero().flatten().tolist()
    if len(numbers) == 1:
        return f"position {numbers[0]} alone"
    return f"{len(numbers)} positions from {numbers[0]} to {numbers[-1]}" if numbers else "no position"
