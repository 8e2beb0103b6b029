"""AdamW, with its two moments in fp32 or in 8 bits.

Sources: Loshchilov and Hutter, 2019; 8-bit moments, Dettmers et al., 2022, by torchao.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch.optim import Optimizer

from torchtitan_cp.config.extras import import_extra
from torchtitan_cp.config.training import Optimizer as OptimizerConfig
from torchtitan_cp.optim.optimizers import Groups


def build(groups: Groups, settings: OptimizerConfig, compute_dtype: torch.dtype) -> Optimizer:
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


def parts(groups: Groups) -> Iterator[Groups]:
    """A parameter each."""
    yield from ([{**group, "params": [parameter]}] for group in groups for parameter in group["params"])
