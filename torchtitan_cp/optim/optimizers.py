"""The optimizers: an entry each, which check, resume, the planner and offloading ask, and a file that builds it.

Another optimizer is such an entry and file, and a name in `config/names.py`; docs/how_to_add.md shows it. The files are
imported by the ranks alone: DTensor takes a second, for which the check of a config would wait.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from torchtitan_cp.config import Config, ConfigError
from torchtitan_cp.config.json_types import JsonObject
from torchtitan_cp.config.training import Optimizer as OptimizerConfig

Group = dict[str, Any]  # a parameter group, as torch.optim takes it
Groups = list[Group]
# Bytes of AdamW's two moments by optimizer.state; in 8 bits with an fp32 scale for each 256 values.
ADAMW_STATE_BYTES = {"float32": 2 * 4.0, "8bit": 2 * (1 + 4 / 256)}
PASS_BYTES = 3 * 4.0  # a weight is read and written, its gradient read
MUON_BYTES = 56.0  # momentum and weight in fp32, directions in bf16; tests/unit/optim/test_muon.py counts operators


@dataclass(frozen=True)
class OptimizerKind:
    """What the rest of the program asks of an optimizer.

    Attributes:
        module: file with two functions. `build`: (parameter groups, [optimizer], compute dtype) -> the optimizer that
            updates all groups; it keeps their keys `lr_scale` and `weight_decay`, and its `step` takes `closure=None`.
            `parts`: (parameter groups) -> the groups in parts that a step can update one after the other.
        state_bytes: ([optimizer]) -> bytes of state of a parameter that it updates.
        update_bytes: ([optimizer]) -> bytes that an update of a parameter reads and writes, without matrix products.
        identity: ([optimizer], experts of a layer, tensor-parallel degree) -> what must be the same to resume, by the
            name that a message gives it.
        check: (config, tensor-parallel degrees of the stages) -> None; raises ConfigError where it cannot run.
        blocks_only: it updates the matrices of the blocks, and AdamW what is left. A group then says whether it is of
            such matrices, by the optimizer's name as its key.
    """

    module: str
    state_bytes: Callable[[OptimizerConfig], float]
    update_bytes: Callable[[OptimizerConfig], float]
    identity: Callable[[OptimizerConfig, int, int], JsonObject]
    check: Callable[[Config, set[int]], None]
    blocks_only: bool = False

    def build(self, groups: Groups, settings: OptimizerConfig, compute_dtype: torch.dtype) -> Optimizer:
        """Make the optimizer of these parameter groups; its file is imported here, with the package that it needs."""
        built: Optimizer = importlib.import_module(self.module).build(groups, settings, compute_dtype)
        return built

    def parts(self, groups: Groups) -> Iterator[Groups]:
        """Split parameter groups so that a step of one part after the other is a step of all of them."""
        yield from importlib.import_module(self.module).parts(groups)


def _adamw_identity(settings: OptimizerConfig, n_experts: int, tp: int) -> JsonObject:
    same: JsonObject = {"optimizer": f"{settings.name}, state in {settings.state}"}
    if settings.state == "8bit":  # torchao quantizes each shard in blocks, which another degree would cut
        same["the tensor-parallel degree of 8-bit moments"] = tp
    return same


def _check_adamw(config: Config, tp_degrees: set[int]) -> None:
    if config.optimizer.state == "8bit" and len(tp_degrees) > 1:
        raise ConfigError(
            "optimizer.state = '8bit' does not work with stages of different tp: torchao cuts its blocks along the "
            "first dimension of a matrix only",
            fix="keep one tp, or use state = 'float32'",
        )


def _muon_identity(settings: OptimizerConfig, n_experts: int, tp: int) -> JsonObject:
    same = _adamw_identity(settings, n_experts, tp)
    if n_experts:  # earlier versions trained experts with AdamW, whose moments differ
        same["optimizer"] = f"muon, experts too, state in {settings.state}"
    return same


def _check_muon(config: Config, tp_degrees: set[int]) -> None:
    _check_adamw(config, tp_degrees)
    if config.parallel.fsdp_cpu_offload:
        raise ConfigError(
            "parallel.fsdp_cpu_offload does not work with optimizer.name = 'muon', whose ranks exchange whole matrices",
            fix="use adamw, or optimizer.offload_state = true instead of parallel.fsdp_cpu_offload",
        )


ADAMW = OptimizerKind(
    "torchtitan_cp.optim.adamw",
    lambda settings: ADAMW_STATE_BYTES[settings.state],
    lambda settings: PASS_BYTES + 2 * ADAMW_STATE_BYTES[settings.state],
    _adamw_identity,
    _check_adamw,
)
MUON = OptimizerKind(
    "torchtitan_cp.optim.muon",
    lambda settings: 4.0,  # a momentum
    lambda settings: MUON_BYTES,
    _muon_identity,
    _check_muon,
    blocks_only=True,
)
OPTIMIZERS = {"adamw": ADAMW, "muon": MUON}


def clip_bytes(settings: OptimizerConfig) -> float:
    """Bytes that clipping moves for a parameter: AdamW's kernel stores its gradient, a pass reads and writes it."""
    return 4.0 if OPTIMIZERS[settings.name] is ADAMW and settings.state == "float32" else 8.0
