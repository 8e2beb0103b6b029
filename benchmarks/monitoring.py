"""What watching a step costs, on one rank with one thread.

Two networks of one config take the same step in turn. One is guarded as in a run: each block's output, the largest
logit, gradient norms by block, spikes. The other exchanges no more than clipping and the log need: the loss, the tokens
and one gradient norm. In CPU time of the process, which other work on the machine disturbs less than the clock on the
wall. The operations that guarding adds are timed by themselves too, as what they add is less than what two equal steps
differ by; and so is telling: losses by position, document and source, and a record in metrics.jsonl and TensorBoard.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tomli
import torch
import torch.distributed as dist

from benchmarks.benchmark import Benchmark, Row
from models import ARCHITECTURES
from torchtitan_cp.config import Config
from torchtitan_cp.config.load import build
from torchtitan_cp.data.loader import MicroBatch, read_step
from torchtitan_cp.health.watch import FIRST_BLOCK, largest, read
from torchtitan_cp.network import Network
from torchtitan_cp.optimizer import square_norms
from torchtitan_cp.parallel import World
from torchtitan_cp.parallel.device import find_device
from torchtitan_cp.registry import register
from torchtitan_cp.telling import Telling
from torchtitan_cp.trainer import Trainer

CONFIG = """
job.dump_folder = "{folder}/run"
model.overrides = {{dim = 256, n_layers = 4, n_heads = 4, n_kv_heads = 2, head_dim = 64, ffn_dim = 704}}
tokenizer.kind = "bytes"
data = {{source = "text", path = "{corpus}", cache_folder = "{folder}/cache", validation_fraction = 0.0}}
training.compute_dtype = "float32"
metrics.peak_tflops = 1.0
curriculum.stages = [{{seq_len = {length}, steps = 1, global_batch_tokens = {length}}}]
"""


Step = Callable[[], None]


def steps(length: int, folder: Path) -> tuple[Step, Step, Step, Step]:
    """A guarded step, one that is not, each of a network of its own; what the first does more; telling of a step."""
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

    hidden = torch.randn(1, length, trainer.network.shape.dim)
    parameters = list(trainer.network.parts.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    blocks = trainer.network.shape.n_layers
    rows = np.ones((1, FIRST_BLOCK + 2 * blocks + 1))

    def more() -> None:
        outputs = [largest(hidden) for _ in range(blocks + 1)]
        torch.stack(outputs).double()
        square_norms(trainer.guarding.counted)
        trainer.guarding.spikes.healthy(read(rows).judged(trainer.guarding.spikes.judge))

    stage, report, losses = trainer.stages[0], trainer.gradients(batches), torch.rand(batches[0].labels.shape)
    telling = Telling(config, world, trainer.network, 1, 0)
    telling.console.terminal.quiet = True
    telling.begin(trainer.reading)
    telling.enter(stage, 0, batches[0])
    progress = trainer.guarding.told(trainer.progress)

    def tell() -> None:
        telling.before(stage, 1, batches)
        assert trainer.network.observe is not None
        trainer.network.observe(batches[0], losses)
        telling.step(stage, progress, report, lr=1e-6, waited=0.0, seconds=1.0, skipped=False, total_steps=1)

    return guarded, lambda: unguarded(bare, batches), more, tell


def cpu_seconds(step: Callable[[], None]) -> float:
    """Of one call, in all threads."""
    begun = time.process_time()
    step()
    return time.process_time() - begun


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
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        store = dist.FileStore(f"{name}/store", 1)
        dist.init_process_group(find_device().backend, store=store, rank=0, world_size=1)
        for length in lengths:
            guarded, bare, more, tell = steps(length, Path(name))
            guarded(), bare(), more(), tell()
            pairs = [(cpu_seconds(guarded), cpu_seconds(bare)) for _ in range(rounds)]
            on, off = zip(*pairs, strict=True)
            row: Row = {"length": length, "unguarded_ms": statistics.median(off) * 1e3}
            row["guarded_ms"] = statistics.median(on) * 1e3
            row["ratio"] = statistics.median(a / b for a, b in pairs)
            row["ratio_of_fastest"] = min(on) / min(off)
            added = statistics.median(cpu_seconds(more) for _ in range(5 * rounds))
            told = statistics.median(cpu_seconds(tell) for _ in range(5 * rounds))
            row |= {"added_ms": added * 1e3, "share": added / statistics.median(off)}
            yield row | {"told_ms": told * 1e3, "told_share": told / statistics.median(off)}
        dist.destroy_process_group()


BENCHMARK = Benchmark(measure, {"lengths": [512, 2048, 8192], "rounds": 21}, {"lengths": [512], "rounds": 5})
