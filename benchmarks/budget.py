"""What a step on one GPU can reach, by the planner: milliseconds, MFU and memory of a shape or a config (nothing runs).

The default shape is eight layers of Llama 3 8B with a quarter of its vocabulary, so that blocks and output keep the
proportion of the whole model. `attention_limit_mfu` is the MFU of attention alone, which a step of ever longer
sequences approaches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch

from benchmarks.benchmark import Benchmark, Row
from models import ARCHITECTURES
from torchtitan_cp.attention import AttentionMask
from torchtitan_cp.attention.ring_cost import BACKWARD_FLOPS, FORWARD_FLOPS
from torchtitan_cp.config import Config
from torchtitan_cp.config.load import apply_override, build
from torchtitan_cp.planner.devices import ACCELERATORS, GIB, Accelerator, Cluster, make_cluster
from torchtitan_cp.planner.estimate import plan_config
from torchtitan_cp.planner.measure import table_entry
from torchtitan_cp.runtime.device import find_device
from torchtitan_cp.training.registry import register

TERA = 1e12


class Prediction(NamedTuple):
    """A step by the planner: its seconds, tokens a second, MFU by the mask (a fraction), peak of a GPU in GiB."""

    seconds: float
    tokens_per_second: float
    mfu: float
    peak_gib: float


def predict(config: Config, cluster: Cluster, documents: Sequence[int] = ()) -> Prediction:
    """The first stage of a config on a cluster; the registry must know its architecture.

    Args:
        documents: lengths of a sequence's documents, if they are masked; MFU then counts the pairs they allow.
    """
    estimate = plan_config(config, cluster)[0]
    allowed = 1.0
    if documents:
        estimate = replace(estimate, mask=AttentionMask(document_lengths=(tuple(documents),)))
        allowed = sum(length**2 for length in documents) / sum(documents) ** 2
    of_mask = estimate.linear_flops + allowed * estimate.attention_flops
    mfu = estimate.mfu * of_mask / (estimate.linear_flops + estimate.attention_flops)
    return Prediction(estimate.step_seconds, estimate.tokens_per_second, mfu, estimate.memory.total / GIB)


def attention_limit(forward: float, backward: float, recomputed: bool, peak: float) -> float:
    """The MFU of a step that is attention alone, a fraction.

    MFU counts a backward as two forwards, and does not count recomputation.

    Args:
        forward, backward: FLOP/s of the kernel, which computes the scores again in its backward.
        recomputed: the forward runs twice.
        peak: FLOP/s of the device.
    """
    seconds = (1 + recomputed) * FORWARD_FLOPS / forward + BACKWARD_FLOPS / backward
    return 3 * FORWARD_FLOPS / seconds / peak


def one_gpu(device: str, *, forward: float = 0.0, backward: float = 0.0, products: float = 0.0) -> Cluster:
    """One device of the planner's table.

    Args:
        forward, backward, products: TFLOP/s of attention and of matrix products in bf16, instead of the table's; 0
            keeps those.
    """
    accelerator: Accelerator = ACCELERATORS[device]
    peak = accelerator.peak_flops[torch.bfloat16] / TERA
    if forward and backward:
        share = (forward / peak, backward / peak)
        accelerator = replace(accelerator, measured=True, attention_forward=share[0], attention_backward=share[1])
    if products:
        accelerator = replace(accelerator, linear=products / peak)
    return make_cluster(device, measured=replace(accelerator, ranks_per_node=1))


def accelerator_here() -> Accelerator:
    """This machine's GPU in the planner's table, or the table's CPU.

    Raises:
        ConfigError: the table does not have this GPU.
    """
    return table_entry(find_device())


def config_of(overrides: Sequence[str]) -> Config:
    """The defaults with overrides, as on the command line, and one stage."""
    table: dict[str, object] = {"curriculum": {"stages": [{"steps": 1}]}}
    for override in overrides:
        apply_override(table, override)
    config: Config = build(Config, table, where="", file="overrides")
    return config


def measure(
    device: str,
    dim: int,
    heads: list[int],
    head_dim: int,
    ffn_dim: int,
    vocabulary: int,
    layers: int,
    lengths: list[int],
    sequences: int,
    modes: list[str],
    tiles: int,
    compile: int,
    forward_tflops: float,
    backward_tflops: float,
    products_tflops: float,
) -> Iterator[Row]:
    """A step of one micro-batch by length and activation mode, bf16 and AdamW, on one device.

    heads: of queries, of keys; sequences: in the micro-batch; tiles: of the MLP; *_tflops: of attention and of matrix
    products, 0 for the planner's.
    """
    register(ARCHITECTURES)
    cluster = one_gpu(device, forward=forward_tflops, backward=backward_tflops, products=products_tflops)
    peak = cluster.accelerator.peak_flops[torch.bfloat16]
    sizes = {"dim": dim, "n_heads": heads[0], "n_kv_heads": heads[1], "head_dim": head_dim, "ffn_dim": ffn_dim}
    sizes |= {"vocab_size": vocabulary, "n_layers": layers}
    shape = ["--model.flavor=8B", *(f"--model.overrides.{name}={size}" for name, size in sizes.items())]
    shape += [f"--training.micro_batch_sequences={sequences}", f"--activation.mlp_tiles={tiles}"]
    shape += [f"--compile.enable={'true' if compile else 'false'}", "--training.loss_chunk_tokens=4096"]
    for length, mode in product(lengths, modes):
        stage = {"seq_len": length, "global_batch_tokens": length * sequences}
        keys = [f"--curriculum.stages[0].{key}={value}" for key, value in stage.items()]
        config = config_of([*shape, *keys, f"--activation.checkpoint={mode}"])
        predicted = predict(config, cluster)
        rates = plan_config(config, cluster)[0].rates(0)
        yield {
            "length": length,
            "activations": mode,
            "ms": predicted.seconds * 1e3,
            "tokens_per_second": predicted.tokens_per_second,
            "mfu": predicted.mfu,
            "attention_limit_mfu": attention_limit(rates.forward, rates.backward, mode == "full", peak),
            "gib": predicted.peak_gib,
            "fits": predicted.peak_gib * GIB <= cluster.usable_bytes,
        }


BENCHMARK = Benchmark(
    measure,
    {
        "device": "h100-80g",
        "dim": 4096,
        "heads": [32, 8],
        "head_dim": 128,
        "ffn_dim": 14336,
        "vocabulary": 32064,
        "layers": 8,
        "lengths": [32768, 131072, 262144],
        "sequences": 1,
        "modes": ["none", "selective", "attention_saved", "full"],
        "tiles": 1,
        "compile": 1,
        "forward_tflops": 0.0,
        "backward_tflops": 0.0,
        "products_tflops": 0.0,
    },
    {"lengths": [32768]},
    {"device": list(ACCELERATORS)},
)
