"""Degrees of a stage's mesh as plain integers, computed from [parallel], the stage and the number of ranks."""

import math
from dataclasses import dataclass, replace

from torchtitan_cp.config.errors import ConfigError
from torchtitan_cp.config.sections import Stage
from torchtitan_cp.config.training import Parallel

ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Degrees:
    """Ranks along each axis of the mesh, outermost first, in one stage.

    Attributes:
        ep: how many of the fsdp ranks share a layer's experts; it adds no ranks.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int = 1

    @property
    def fsdp(self) -> int:
        """Ranks that the parameters are sharded over. It is the same in every stage of one tp and pp."""
        return self.dp_shard * self.cp

    @property
    def dp(self) -> int:
        """Ranks that hold different sequences."""
        return self.dp_replicate * self.dp_shard

    def check_divides_fsdp(self, key: str, degree: int, other_fix: str = "") -> None:
        """Refuse a degree that does not divide the FSDP ranks, naming those that do.

        Args:
            key: dotted name of the degree.
            other_fix: what else the user may do.
        """
        if self.fsdp % degree:
            divisors = ", ".join(str(number) for number in range(1, self.fsdp + 1) if self.fsdp % number == 0)
            raise ConfigError(
                f"{key} = {degree} does not divide dp_shard x cp = {self.fsdp} (from [parallel] and the ranks)",
                fix=f"use {divisors}{other_fix}",
            )


def length_unit(cp: int, tp: int) -> int:
    """The number that must divide a sequence's tokens, so that cp x tp ranks can share it."""
    return math.lcm(2 * cp if cp > 1 else 1, cp * tp)


def resolve_degrees(parallel: Parallel, ranks: int, stage: Stage, where: str) -> Degrees:
    """The degrees of a stage: those of [parallel], with the one -1 filled in so that the product is `ranks`.

    Args:
        stage: if it sets tp or pp, these replace the degrees of [parallel]; its cp divides dp_shard x cp anew.
        where: the dotted key of the stage.

    Raises:
        ConfigError: two degrees are -1, the product is not `ranks`, or ep or the stage's cp does not divide
            dp_shard x cp.
    """
    own = {name: degree for name in ("tp", "pp") if (degree := getattr(stage, name)) is not None}
    degrees = {name: getattr(parallel, name) for name in ORDER} | own
    text = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree != 1) or "every degree 1"
    open_axes = [name for name, degree in degrees.items() if degree == -1]
    if len(open_axes) > 1:
        raise ConfigError(
            f"{' and '.join('parallel.' + name for name in open_axes)} are all -1", fix="set -1 for one of them"
        )
    known = math.prod(degree for degree in degrees.values() if degree != -1)
    if ranks % known or (not open_axes and known != ranks):
        fits = f"start a multiple of {known} ranks" if open_axes else f"start {known} ranks"
        fix = f"{fits} in the job (./run_train.sh --ranks {known}), "
        fix += "or change a degree" if open_axes else "change a degree, or set one to -1"
        of_stage = ""
        if own:  # other stages may need another number
            of_stage = f" with {' and '.join(f'{name} = {degree}' for name, degree in own.items())} of a stage"
            fix = "set parallel.dp_shard = -1, or " * (not open_axes) + "change the stage's tp or pp"
        raise ConfigError(
            f"[parallel]{of_stage} asks for {text} and the job has {ranks} ranks: {known} "
            + ("does not divide them" if open_axes else "are needed"),
            fix=fix,
        )
    if open_axes:
        degrees[open_axes[0]] = ranks // known
    resolved = Degrees(**degrees, ep=parallel.ep)
    resolved.check_divides_fsdp("parallel.ep", resolved.ep)
    if stage.cp is None:
        return resolved
    cp = resolved.fsdp if stage.cp == -1 else stage.cp
    others = f" or -1 for all, e.g. '--{where}.cp=-1', or another number of ranks"
    resolved.check_divides_fsdp(f"{where}.cp", cp, others)
    return replace(resolved, cp=cp, dp_shard=resolved.fsdp // cp)
