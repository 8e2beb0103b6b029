"""The smallest context-parallel degree and number of devices on which a length fits: the table of docs/planner.md."""

import dataclasses

from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.check import check_config
from torchtitan_cp.config.sections import Stage
from torchtitan_cp.curriculum import resolve_stages
from torchtitan_cp.parallel.checks import check_tensor_parallel
from torchtitan_cp.planner.devices import Cluster, make_cluster
from torchtitan_cp.planner.estimate import Estimate
from torchtitan_cp.training.registry import model_args_of
from torchtitan_cp.training.resolve import LOSS_CHUNK_TOKENS

FLAVORS, LENGTHS = ("8B", "70B", "405B"), (32768, 131072, 524288, 1048576)
MAX_RANKS, NODE, MLP_TILES = 4096, 8, 8


def smallest_table(device: str) -> list[str]:
    """Lines of a Markdown table: shapes by lengths, `tp x cp on N` with the fewest devices, then the smallest cp."""
    lines = [
        "| shape | " + " | ".join(f"{length // 1024}K" for length in LENGTHS) + " |",
        "|---|" + "---|" * len(LENGTHS),
    ]
    for flavor in FLAVORS:
        cells = []
        for length in LENGTHS:
            ranks, tp, cp = fewest_ranks(flavor, length, device)
            cells.append(f"{ranks} (tp {tp} x cp {cp}); cp {smallest_cp(flavor, length, device)}")
        lines.append(f"| {flavor} | " + " | ".join(cells) + " |")
    return lines


def fewest_ranks(flavor: str, seq_len: int, device: str) -> tuple[int, int, int]:
    """(ranks, tp, cp) of the smallest job that fits, with the smallest cp of those, then the smallest tp.

    Raises:
        ConfigError: not even 4,096 devices are enough.
    """
    ranks = 1
    while ranks <= MAX_RANKS:
        for cp in _powers(ranks):
            for tp in _powers(min(NODE, ranks // cp)):
                if fits(flavor, seq_len, device, ranks, tp, cp):
                    return ranks, tp, cp
        ranks *= 2
    raise ConfigError(f"{flavor} at {seq_len} tokens fits on no {MAX_RANKS} x {device}", fix="use another device")


def smallest_cp(flavor: str, seq_len: int, device: str) -> int:
    """The smallest cp with any tp inside a node, where 4,096 devices share weights and optimizer.

    Raises:
        ConfigError: none is enough.
    """
    for cp in _powers(MAX_RANKS):
        if any(fits(flavor, seq_len, device, MAX_RANKS, tp, cp) for tp in _powers(NODE) if tp * cp <= MAX_RANKS):
            return cp
    raise ConfigError(f"{flavor} at {seq_len} tokens fits with no cp on {device}", fix="use another device")


def fits(flavor: str, seq_len: int, device: str, ranks: int, tp: int, cp: int) -> bool:
    """Whether a sequence a data-parallel rank fits: ring, full recomputation, the MLP in tiles, AdamW in fp32."""
    cluster = _cluster(device, ranks)
    config = _config(flavor, seq_len, ranks, tp, cp)
    args = model_args_of(config.model)
    try:
        check_tensor_parallel(args, tp)
        stages = resolve_stages(config, ranks, lambda degrees: {0: "ring"})
        check_config(config, stages, ranks)
    except ConfigError:
        return False
    return Estimate(config, args, stages[0], cluster).fits


def _config(flavor: str, seq_len: int, ranks: int, tp: int, cp: int) -> Config:
    base = Config()
    stage = Stage(seq_len=seq_len, steps=1, global_batch_tokens=seq_len * ranks // (tp * cp), cp=cp, strategy="ring")
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, flavor=flavor),
        training=dataclasses.replace(base.training, loss_chunk_tokens=LOSS_CHUNK_TOKENS),
        parallel=dataclasses.replace(base.parallel, tp=tp),
        activation=dataclasses.replace(base.activation, checkpoint="full", mlp_tiles=MLP_TILES),
        curriculum=dataclasses.replace(base.curriculum, stages=(stage,)),
    )


def _cluster(device: str, ranks: int) -> Cluster:
    return make_cluster(device, max(1, ranks // NODE), ranks_per_node=min(NODE, ranks))


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]
