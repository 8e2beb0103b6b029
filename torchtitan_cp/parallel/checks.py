"""Whether a model's sizes can be split over so many ranks; unlike the code that splits them, it imports no DTensor."""

from torchtitan_cp.config import ConfigError
from torchtitan_cp.config.contract import ModelArgs
from torchtitan_cp.config.training import Parallel


def check_tensor_parallel(args: ModelArgs, tp: int) -> None:
    """Refuse sizes that tensor parallelism cannot split evenly.

    Args:
        args: ModelArgs with `n_heads`, `n_kv_heads` and `ffn_dim`.

    Raises:
        ConfigError: naming the size and the degrees that divide it.
    """
    for name in ("n_kv_heads", "n_heads", "ffn_dim"):
        size = getattr(args, name)
        if size % tp:
            fits = [str(degree) for degree in range(1, tp) if size % degree == 0]
            raise ConfigError(
                f"parallel.tp = {tp} does not divide the model's {name} = {size}",
                fix=f"use tp {' or '.join(fits)}, and context parallelism (parallel.cp) for the other ranks",
            )


def check_expert_parallel(args: ModelArgs, parallel: Parallel) -> None:
    """Refuse experts that cannot be shared evenly, and a model without any.

    Args:
        args: ModelArgs with `n_experts`.

    Raises:
        ConfigError: naming the key and the degrees that fit.
    """
    if not args.n_experts and parallel.ep > 1:
        raise ConfigError(
            f"parallel.ep = {parallel.ep} is for models with experts, and this one has none",
            fix="leave it out, or use another model.architecture",
        )
    if args.n_experts % parallel.ep:
        fits = [str(degree) for degree in range(1, parallel.ep) if args.n_experts % degree == 0]
        raise ConfigError(
            f"parallel.ep = {parallel.ep} does not divide the model's {args.n_experts} experts",
            fix=f"use ep {' or '.join(fits)}",
        )
