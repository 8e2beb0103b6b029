"""`torchtitan-cp replay BUNDLE` runs the module that a bad step began in again, on one process."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from models import ARCHITECTURES
from torchtitan_cp.config import UserError
from torchtitan_cp.config.sections import Model
from torchtitan_cp.health.replay import Bundle, replay
from torchtitan_cp.optim.loss import ChunkedCrossEntropy
from torchtitan_cp.training.model import LayerAttention
from torchtitan_cp.training.registry import architecture, register


def build(bundle: Bundle) -> nn.Module:
    """The module of a bundle with the weights it had, in the run's compute dtype."""
    report, name = bundle.report, bundle.report["unit"]
    if name == "loss":
        return ChunkedCrossEntropy(report["loss_chunk_tokens"], report["z_loss"])
    known = architecture(Model(architecture=report["architecture"]))
    sizes = {key: tuple(value) if isinstance(value, list) else value for key, value in report["sizes"].items()}
    with torch.device("meta"):
        args = type(next(iter(known.flavors.values())))(**sizes)
        module = known.build(args, LayerAttention()).get_submodule(name)
    module.load_state_dict(bundle.under("weight."), assign=True, strict=False)
    return module.to(getattr(torch, report["compute_dtype"]))


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
        event = replay(bundle, build)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if event is None:
        healthy = "no numbers as large" if bundle.report["times"] else "finite numbers"
        print(f"here:        {bundle.report['unit']} gives {healthy} here: other hardware, or another kernel")
        return 1
    print(f"here:        REPRODUCED: the {event.what} of {event.module} is {event.value} at {list(event.index)}")
    return 0
