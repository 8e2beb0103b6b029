"""What watching a step costs, on one rank.

Two networks of one config take the same step in turn. One is guarded as in a run: each block's output, the largest
logit, gradient norms by block, spikes. The other exchanges no more than clipping and the log need: the loss, the tokens
and one gradient norm.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import tomli
import torch
import torch.distributed as dist

from benchmarks.benchmark import Benchmark, Row
from benchmarks.ranks import seconds
from models import ARCHITECTURES
from torchtitan_cp.config import Config
from torchtitan_cp.config.load import build
from torchtitan_cp.data.loader import MicroBatch, read_step
from torchtitan_cp.network import Network
from torchtitan_cp.optimizer import square_norms
from torchtitan_cp.parallel import World
from torchtitan_cp.parallel.device import find_device
from torchtitan_cp.registry import register
from torchtitan_cp.trainer import Trainer

CONFIG = """
job.dump_folder = "{folder}/run"
model.overrides = {{dim = 256, n_layers = 4, n_heads = 4, n_kv_heads = 2, head_dim = 64, ffn_dim = 704}}
tokenizer.kind = "bytes"
data = {{source = "text", path = "{corpus}", cache_folder = "{folder}/cache", validation_fraction = 0.0}}
training.compute_dtype = "float32"
metrics = {{tensorboard = false, peak_tflops = 1.0}}
curriculum.stages = [{{seq_len = {length}, steps = 1, global_batch_tokens = {length}}}]
"""


def steps(length: int, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """A guarded step and one that is not, each of a network of its own."""
    text = CONFIG.format(folder=folder, corpus=Path(__file__).parents[1] / "docs", length=length)
    config = build(Config, tomli.loads(text), where="", file="benchmark")
    world = World(0, 1, find_device())
    trainer = Trainer(config, world)
    bare = Network(config, world, trainer.meshes, trainer.network.shape, trainer.stages[0], length)
    shape = trainer.enter_stage(trainer.stages[0])
    bare.enter(trainer.stages[0])
    batches = read_step(trainer.reading.samples, shape, 0)

    def guarded() -> None:
        report = trainer.gradients(batches)
        trainer.guarding.is_bad(report)
        trainer.guarding.passed_well(report)
        trainer.network.update(1e-6, report.grad_norm)

    return guarded, lambda: unguarded(bare, batches)


def unguarded(network: Network, batches: tuple[MicroBatch, ...]) -> None:
    """A step that exchanges three numbers."""
    sums = network.gradients(batches)
    norm = square_norms([list(network.parts.parameters())])[0]
    own = torch.stack([sums.loss.double(), sums.tokens.double(), norm])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    network.update(1e-6, torch.stack(gathered).sum(0).tolist()[2] ** 0.5)


def measure(lengths: list[int], rounds: int) -> Iterator[Row]:
    """fp32, on one rank: medians of as many steps of each, in turn."""
    register(ARCHITECTURES)
    with tempfile.TemporaryDirectory() as name:
        store = dist.FileStore(f"{name}/store", 1)
        dist.init_process_group(find_device().backend, store=store, rank=0, world_size=1)
        for length in lengths:
            guarded, bare = steps(length, Path(name))
            guarded(), bare()
            pairs = [(seconds(guarded), seconds(bare)) for _ in range(rounds)]
            on, off = zip(*pairs, strict=True)
            row = {"length": length, "unguarded_ms": statistics.median(off) * 1e3}
            row["guarded_ms"] = statistics.median(on) * 1e3
            row["ratio"] = statistics.median(a / b for a, b in pairs)
            yield row | {"ratio_of_fastest": min(on) / min(off)}
        dist.destroy_process_group()


BENCHMARK = Benchmark(measure, {"lengths": [512, 2048, 8192], "rounds": 21}, {"lengths": [512], "rounds": 5})
