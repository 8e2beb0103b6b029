"""`torchtitan-cp replay BUNDLE` runs the culprit of a bad step again, on one process.

An entry point: it knows models and the rooms, as `train.py` does.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models import ARCHITECTURES
from torchtitan_cp.attention import AttentionMask, make_plan
from torchtitan_cp.config import UserError
from torchtitan_cp.config.labels import IGNORED
from torchtitan_cp.config.sections import Inject, Model
from torchtitan_cp.health.bundle import PLANS, Bundle
from torchtitan_cp.health.inject import Strike
from torchtitan_cp.health.trace import BACKWARD, Event, Magnitudes, Trace, find_invalid_tokens, find_nonfinite
from torchtitan_cp.optim import TokenLoss
from torchtitan_cp.training.model import LayerAttention
from torchtitan_cp.training.registry import architecture, register

AS_LARGE = 0.9  # of a spike's largest value: another order of sums may make it a little smaller


def replay(bundle: Bundle) -> Event | None:
    """Run the module of a bundle.

    Returns:
        its first ill event, of a spike the same tensor if it is as large; None if all is well.

    Raises:
        UserError: the bundle has no module, as the step was healthy when the run repeated it.
    """
    report = bundle.report
    batch: dict[str, Tensor] = {name: bundle.tensors[name] for name in ("tokens", "labels") if name in bundle.tensors}
    if event := find_invalid_tokens([batch], report["sizes"]["vocab_size"], IGNORED):
        return event
    if report["unit"] is None:
        raise UserError(
            "the bundle holds no module: the step was healthy when it was repeated, or no single module made it ill",
            fix="read its report.json; a step that is healthy when repeated speaks of the hardware, or of a race",
        )
    for name, weight in bundle.under("weight.").items():
        if found := find_nonfinite(weight):
            return Event((), -1, "forward", report["unit"], f"parameter {name}", *found)
    unit = _build(bundle)
    arguments = [_argument(bundle, entry) for entry in report["arguments"]]
    for x in arguments:
        if isinstance(x, Tensor) and x.is_floating_point():
            x.requires_grad_()
    strike = _strike_again(unit, report)
    watch = Magnitudes if report["times"] else Trace
    with watch([(0, report["unit"], unit)]) as trace:
        outputs = unit(*arguments)
        gradients = {int(place): x for place, x in bundle.under("output_gradient.").items()}
        if report["culprit"]["direction"] == BACKWARD:
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            torch.autograd.backward([outputs[place] for place in gradients], list(gradients.values()))
    strike.end()
    return _as_large(trace, report["culprit"]) if isinstance(trace, Magnitudes) else trace.first


def _as_large(found: Magnitudes, culprit: dict[str, Any]) -> Event | None:
    """What a spike was of, if it comes near to what it was."""
    least, known = AS_LARGE * float(culprit["value"]), {**culprit, "order": ()}
    place = Event(**known).place
    return next((event for value, event in found.seen if event.place == place and value >= least), None)


def _build(bundle: Bundle) -> nn.Module:
    """The module with the weights it had, in the run's compute dtype."""
    report, name = bundle.report, bundle.report["unit"]
    if name == "loss":
        return TokenLoss(report["loss_chunk_tokens"], report["z_loss"])
    kind = architecture(Model(architecture=report["architecture"]))
    sizes = {key: tuple(value) if isinstance(value, list) else value for key, value in report["sizes"].items()}
    with torch.device("meta"):
        unit = kind.build(type(next(iter(kind.flavors.values())))(**sizes), LayerAttention()).get_submodule(name)
    unit.load_state_dict(bundle.under("weight."), assign=True, strict=False)
    return unit.to(getattr(torch, report["compute_dtype"]))


def _argument(bundle: Bundle, entry: Any) -> Any:
    """What stands for an argument in the report, as it was."""
    if entry != PLANS:
        return entry if entry is None else bundle.tensors[entry]
    report = bundle.report
    lengths = report["document_lengths"]
    rows = None if lengths is None else tuple(tuple(row) for row in lengths)

    def plan(window: int) -> Any:
        mask = AttentionMask(window=(window - 1 if window else -1, -1), document_lengths=rows)
        return make_plan(report["seq_len"], mask=mask)

    return {window: plan(window) for window in {0, *report["windows"]}}


def _strike_again(unit: nn.Module, report: dict[str, Any]) -> Strike:
    """The fault that the run made on purpose, if it made one in this module."""
    settings = Inject(**report["inject"])
    strike, struck = Strike(settings.kind), report["struck"]
    modules = dict(unit.named_modules(prefix=report["unit"]))
    if report["injected"] and struck in modules and settings.where != "weight":
        weight = next((name for name, _ in modules[struck].named_parameters(recurse=False)), None)
        strike.at(modules[struck], settings.where, weight, prepend=False)
    return strike


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="torchtitan-cp replay", description=__doc__)
    parser.add_argument("bundle", type=Path, help="a folder that a run wrote under health/")
    options = parser.parse_args(arguments)
    register(ARCHITECTURES)
    try:
        bundle = Bundle.read(options.bundle)
        print(f"in the run:  {bundle.report['said']}")
        if bundle.report["injected"]:
            print("             (a fault made on purpose by [health.inject], which is made again here)")
        event = replay(bundle)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if event is None:
        healthy = "no numbers as large" if bundle.report["times"] else "finite numbers"
        print(f"here:        {bundle.report['unit']} gives {healthy} here: other hardware, or another kernel")
        return 1
    print(f"here:        REPRODUCED: the {event.what} of {event.module} is {event.value} at {list(event.index)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
