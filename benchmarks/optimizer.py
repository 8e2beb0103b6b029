"""How long an optimizer's step takes."""

import dataclasses
import itertools
import statistics
from collections.abc import Iterator

import torch

from benchmarks.benchmark import Benchmark, Row
from benchmarks.ranks import seconds
from models.llama import Llama, LlamaArgs
from torchtitan_cp.config.training import Optimizer as OptimizerConfig
from torchtitan_cp.optim.build import build_optimizer

OPTIMIZERS = {
    "AdamW": OptimizerConfig(),
    "AdamW, state in 8 bits": OptimizerConfig(state="8bit"),
    "Muon": OptimizerConfig(name="muon"),
}


def stepper(name: str, shape: LlamaArgs, device: torch.device) -> torch.optim.Optimizer:
    """An optimizer whose parameters have gradients and whose state exists."""
    torch.manual_seed(0)
    with device:
        model = Llama(shape, lambda *_: None)  # type: ignore[arg-type]
    optimizer = build_optimizer(model, OPTIMIZERS[name])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer.step()
    return optimizer


def measure(dim: int, layers: int, optimizers: list[str], rounds: int) -> Iterator[Row]:
    """fp32, a Llama of this width without its attention: the optimizers in turn, medians beside the first's."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = dataclasses.replace(
        LlamaArgs(dim, layers, dim // 64, dim // 128, 64, 4 * dim), vocab_size=4096, tie_embeddings=True
    )
    steppers = {name: stepper(name, shape, device) for name in optimizers}

    def step(name: str) -> None:
        steppers[name].step()
        if device.type == "cuda":
            torch.cuda.synchronize()

    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _, name in itertools.product(range(rounds), optimizers):
        times[name].append(seconds(lambda name=name: step(name)) * 1e3)  # type: ignore[misc]
    count = sum(p.numel() for group in steppers[optimizers[0]].param_groups for p in group["params"])
    first = statistics.median(times[optimizers[0]])
    for name in optimizers:
        median = statistics.median(times[name])
        fastest = min(times[name]) / min(times[optimizers[0]])
        yield {
            "optimizer": name,
            "parameters": count,
            "ms": median,
            "over_first": median / first,
            "over_first_of_fastest": fastest,
        }


BENCHMARK = Benchmark(
    measure,
    {"dim": 512, "layers": 8, "optimizers": list(OPTIMIZERS), "rounds": 9},
    {"dim": 256, "layers": 2, "rounds": 3},
    {"optimizers": list(OPTIMIZERS)},
)
