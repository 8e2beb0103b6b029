"""AdamW, with its two moments in fp32 or in 8 bits.

Sources: Loshchilov and Hutter, 2019; 8-bit moments, Dettmers et al., 2022, by torchao.
"""

from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.optim import Optimizer

from torchtitan_cp.config import Config, ConfigError, sections
from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.optim.optimizers.kind import Groups, OptimizerKind

# Bytes of two moments by optimizer.state; in 8 bits with an fp32 scale for each 256 values.
STATE_BYTES = {"float32": 2 * 4.0, "8bit": 2 * (1 + 4 / 256)}


def build(groups: Groups, settings: sections.Optimizer, compute_dtype: torch.dtype) -> Optimizer:
    """AdamW over these groups.

    Raises:
        ConfigError: torchao is missing.
    """
    options: dict[str, Any] = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    if settings.state == "8bit":
        torchao = import_extra("torchao.optim", extra="float8", needed_by="optimizer.state = '8bit'")
        # Its update is compiled. torch's cache on disk is keyed by whole DTensors (2.13): a rank could load code for
        # another rank's device, or for a shard of another size or kind. Source: pytorch/pytorch issue 188390.
        functorch_config.enable_autograd_cache = False
        return torchao.AdamW8bit(groups, **options)
    return torch.optim.AdamW(groups, **options, fused=True)


def identity(settings: sections.Optimizer, n_experts: int, tp: int) -> dict[str, Any]:
    """See OptimizerKind."""
    same: dict[str, Any] = {"optimizer": f"{settings.name}, state in {settings.state}"}
    if settings.state == "8bit":  # torchao quantizes each shard in blocks, which another degree would cut
        same["the tensor-parallel degree of 8-bit moments"] = tp
    return same


def check(config: Config, tp_degrees: set[int]) -> None:
    """See OptimizerKind."""
    if config.optimizer.state == "8bit" and len(tp_degrees) > 1:
        raise ConfigError(
            "optimizer.state = '8bit' does not work with stages of different tp: torchao cuts its blocks along the "
            "first dimension of a matrix only",
            fix="keep one tp, or use state = 'float32'",
        )


ADAMW = OptimizerKind(build, lambda settings: STATE_BYTES[settings.state], identity, check)
