"""AdamW, with its two moments in fp32 or in 8 bits.

Sources: Loshchilov and Hutter, 2019; 8-bit moments, Dettmers et al., 2022, by torchao.
"""

from collections.abc import Iterator

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
    lr, betas, eps = settings.lr, (settings.beta1, settings.beta2), settings.eps
    if settings.state == "8bit":
        torchao = import_extra("torchao.optim", extra="float8", needed_by="optimizer.state = '8bit'")
        # Its update is compiled. torch's cache on disk is keyed by whole DTensors (2.13): a rank could load code for
        # another rank's device, or for a shard of another size or kind. Source: pytorch/pytorch issue 188390.
        functorch_config.enable_autograd_cache = False
        eight_bit: Optimizer = torchao.AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
        return eight_bit
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def parts(groups: Groups) -> Iterator[Groups]:
    """A parameter each."""
    yield from ([{**group, "params": [parameter]}] for group in groups for parameter in group["params"])
