"""`torchtitan-cp replay BUNDLE` reruns the module in which a bad step began, on one process."""

import argparse
from pathlib import Path

import torch
from torch import nn

from torchtitan_cp.cli.command import run_command
from torchtitan_cp.config.sections import Model
from torchtitan_cp.config.training import Lora
from torchtitan_cp.health.replay import Bundle, replay
from torchtitan_cp.optim.loss import ChunkedCrossEntropy
from torchtitan_cp.parallel.lora import apply_lora
from torchtitan_cp.parallel.nf4 import fill_tables
from torchtitan_cp.training.model import LayerAttention, cast_parameters
from torchtitan_cp.training.registry import args_from, empty_model


def build(bundle: Bundle) -> nn.Module:
    """The module of a bundle with its weights, in the run's compute dtype."""
    report, name = bundle.report, bundle.report["module"]
    if name == "loss":
        scale, softcap = report.get("logit_scale", 1.0), report.get("logit_softcap", 0.0)
        return ChunkedCrossEntropy(report["loss_chunk_tokens"], report.get("z_loss", 0.0), scale, softcap)
    assert name, "a bundle without a module is refused before"
    model = Model(architecture=report["architecture"])
    whole = empty_model(model, args_from(model, report["sizes"]), LayerAttention())
    if lora := report.get("lora"):
        apply_lora(whole, Lora(**lora))
        fill_tables(whole, torch.device("cpu"))
    module = whole.get_submodule(name)
    module.load_state_dict(bundle.under("weight."), assign=True, strict=False)
    return cast_parameters(module, getattr(torch, report["compute_dtype"]))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="torchtitan-cp replay", description=__doc__)
    parser.add_argument("bundle", type=Path, help="a folder that a run wrote under health/")
    options = parser.parse_args(arguments)
    return run_command(lambda: _replay(options.bundle))


def _replay(folder: Path) -> int:
    """Run a bundle's module again and print whether the bad values come back. Returns the exit code."""
    bundle = Bundle.read(folder)
    print(f"in the run:  {bundle.report['summary']}")
    event = replay(bundle, build)
    if event is None:
        healthy = "no numbers as large" if bundle.report["times"] else "finite numbers"
        print(f"here:        {bundle.report['module']}: not reproduced ({healthy}): hardware or kernel differs")
        return 1
    print(f"here:        REPRODUCED: the {event.quantity} of {event.module} is {event.value} at {list(event.index)}")
    return 0
