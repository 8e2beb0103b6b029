"""What watching a step costs, on one rank with one thread.

Two networks of one config take the same step in turn. One is guarded as in a run: each block's output, the largest
logit, gradient norms by block, spikes. The other exchanges no more than clipping and the log need: the loss, the tokens
and one gradient norm. In CPU time of the process, which other work on the machine disturbs less than the clock on the
wall. The operations that guarding adds are timed by themselves too, as what they add is less than what two equal steps
differ by; and so is telling: losses by position, document and source, and a record in metrics.jsonl and TensorBoard.
"""

import dataclasses
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
from torchtitan_cp.data.batches.micro_batches import MicroBatch, read_step
from torchtitan_cp.health.monitor import FIRST_BLOCK, largest, read_report
from torchtitan_cp.health.recovery import RecoveryState
from torchtitan_cp.metrics.logger import MetricsLogger
from torchtitan_cp.optim.clip import square_norms
from torchtitan_cp.runtime.device import World, find_device
from torchtitan_cp.training.model import ParallelModel
from torchtitan_cp.training.registry import register
from torchtitan_cp.training.resolve import resolve_run
from torchtitan_cp.training.run_recorder import RunRecorder
from torchtitan_cp.training.trainer import Trainer

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
    run = resolve_run(config, 1, trainer.model.args, device=world.device.device.type)
    bare = ParallelModel(run, world, trainer.meshes, trainer.stages[0])
    shape = trainer.enter_stage(trainer.stages[0])
    bare.configure_stage(trainer.stages[0])
    batches, spikes = read_step(trainer.data_pipeline.samples, shape, 0), trainer.step_runner.monitor.spikes

    def guarded() -> None:
        report = trainer.forward_backward(batches)
        trainer.step_runner.monitor.is_bad(report, 1)
        spikes.record_healthy_step(report)
        trainer.model.update(1e-6, report.grad_norm)

    hidden = torch.randn(1, length, trainer.model.args.dim)
    parameters = list(trainer.model.parts.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    blocks = trainer.model.args.n_layers
    rows = np.ones((1, FIRST_BLOCK + 2 * blocks + 1))

    def more() -> None:
        outputs = [largest(hidden) for _ in range(blocks + 1)]
        torch.stack(outputs).double()
        square_norms(trainer.model.norm_groups)
        report = read_report(rows)
        spikes.find(report)
        spikes.record_healthy_step(report)

    stage, report, losses = trainer.stages[0], trainer.forward_backward(batches), torch.rand(batches[0].labels.shape)
    metrics_logger = MetricsLogger(config.metrics, 1, 0, enabled=False)
    recorder = RunRecorder(trainer.model, trainer.data_pipeline, metrics_logger)
    recorder.start(0)
    progress = dataclasses.replace(trainer.progress, health=dataclasses.asdict(RecoveryState()))
    recorder.start_stage(stage, progress, batches[0], 0.0)

    def tell() -> None:
        recorder.start_step(stage, 1, batches)
        assert trainer.model.observe is not None
        trainer.model.observe(batches[0], losses)
        recorder.record_step(stage, progress, report, lr=1e-6, waited=0.0, seconds=1.0, skipped=False, total_steps=1)

    return guarded, lambda: unguarded(bare, batches), more, tell


def cpu_seconds(step: Callable[[], None]) -> float:
    """Of one call, in all threads."""
    begun = time.process_time()
    step()
    return time.process_time() - begun


def unguarded(model: ParallelModel, batches: tuple[MicroBatch, ...]) -> None:
    """A step that exchanges three numbers."""
    sums = model.forward_backward(batches)
    norm = square_norms([list(model.parts.parameters())])[0]
    own = torch.stack([sums.loss.double(), sums.divisor.double(), norm])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    model.update(1e-6, torch.stack(gathered).sum(0).tolist()[2] ** 0.5)


def measure(lengths: list[int], rounds: int) -> Iterator[Row]:
    """fp32, on one rank: medians of as many steps of each, in turn."""
    register(ARCHITECTURES)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        dist.init_process_group(find_device().backend, store=dist.HashStore(), rank=0, world_size=1)
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
