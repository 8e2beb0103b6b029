"""Plans of the long recipe, on nodes of eight GPUs and on one GPU."""

from models import ARCHITECTURES
from torchtitan_cp.config import load_config
from torchtitan_cp.planner.devices import make_cluster
from torchtitan_cp.planner.estimate import Estimate, plan_config
from torchtitan_cp.training.registry import register

LONG = "train_configs/llama3_8b_4k_to_1m.toml"


def estimates(path: str, *overrides: str, nodes: int = 8, device: str = "h100-80g") -> tuple[Estimate, ...]:
    register(ARCHITECTURES)
    return plan_config(load_config(path, overrides), make_cluster(device, nodes))


ONE_GPU = (
    "--curriculum.stages=[{seq_len = 131072, steps = 1, global_batch_tokens = 131072}]",
    "--lr_scheduler.warmup_steps=0",
    "--activation.checkpoint=full",
)


def alone(*overrides: str, **given: float) -> Estimate:
    """The long recipe's model at 128K on one H100."""
    register(ARCHITECTURES)
    cluster = make_cluster("h100-80g", ranks_per_node=1, **given)
    return plan_config(load_config(LONG, (*ONE_GPU, *overrides)), cluster)[0]
