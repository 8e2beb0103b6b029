"""What a search says: why it chose, what would be faster and does not fit, and how near the nearest miss is."""

from collections.abc import Sequence

from torchtitan_cp.config import ConfigError
from torchtitan_cp.planner.choices import KEYS, OWN, Savings, has_own_choice
from torchtitan_cp.planner.devices import GIB
from torchtitan_cp.planner.estimate import Estimate
from torchtitan_cp.planner.search import Candidate, Search, best

DEGREES = tuple(field for field in KEYS if field not in Savings._fields)


def reasons(search: Search) -> list[str]:
    """A line for each choice of a search that found something, and one for each stage."""
    found = search.found
    assert found
    # Degrees and modes are compared with whatever saves memory beside them, the rest beside the same degrees and mode.
    group = [one for one in search.tried if all(_same(one, found, field) for field in DEGREES)]
    lines = [_choice_reason(field, found, search.tried, search.slower) for field in DEGREES]
    lines += [_choice_reason(field, found, group, []) for field in Savings._fields]
    lines = list(filter(None, lines))
    if overriding := [i for i, stage in enumerate(search.config.curriculum.stages) if has_own_choice(stage)]:
        lines.append(f"curriculum.stages {overriding}: their own {OWN} are left out")
    lines += [_stage_reason(*pair) for pair in zip(found.picked, found.stages, strict=True)]
    return [*lines, *_faster_miss(search), _memory_reason(found.picked), *_offload_reason(found)]


def _same(one: Candidate, other: Candidate, field: str) -> bool:
    return one.choice.value(field) == other.choice.value(field)


def _choice_reason(field: str, found: Candidate, tried: Sequence[Candidate], slower: Sequence[Candidate]) -> str:
    """A key's value, with the best that every other value gives; empty where only one of several ways is possible."""
    values: dict[str, list[Candidate]] = {}
    bounds: dict[str, list[Candidate]] = {}
    for candidates, by_value in ((tried, values), (slower, bounds)):
        for candidate in candidates:
            by_value.setdefault(candidate.choice.shown(field), []).append(candidate)
    chosen = found.choice.shown(field)
    others = [value for value in dict.fromkeys([*values, *bounds]) if value != chosen]
    if not others and field not in ("tp", "pp"):
        return ""
    said = [f"{value} {_outcome(found, values.get(value, []), bounds.get(value, []))}" for value in sorted(others)]
    return f"{KEYS[field]} = {chosen}: " + ("; ".join(said) or "nothing else divides")


def _outcome(found: Candidate, tried: list[Candidate], slower: list[Candidate]) -> str:
    """What other candidates give beside the one found."""
    exact = min((one.days for one in tried if one.fits), default=float("inf"))
    bound = min((one.least_days for one in slower), default=float("inf"))
    if exact <= bound and exact < float("inf"):
        return "takes as long" if abs(exact / found.days - 1) < 0.005 else f"takes {exact / found.days - 1:+.0%}"
    if slower:
        return f"takes at least {bound / found.days - 1:+.0%}"
    return f"misses by {shortfall(min(tried, key=lambda one: one.fullest.fullness).fullest)}"


def shortfall(estimate: Estimate) -> str:
    """By how much a stage does not fit, and of what."""
    return " and ".join(
        f"{need.over_bytes / GIB:.1f} GiB of {need.of}" for need in estimate.needs if need.over_bytes > 0
    )


def _stage_reason(found: Estimate, options: list[Estimate]) -> str:
    """A stage's degree and strategy, compared with the best of every other degree and with other strategies."""
    stage, others = found.stage, []
    for cp in sorted({option.stage.cp for option in options} - {stage.cp}):
        others.append(f"cp {cp} {_compare(found, best([option for option in options if option.stage.cp == cp]))}")
    for option in options:
        if option.stage.cp == stage.cp and option.stage.strategy != stage.strategy:
            others.append(f"{option.stage.strategy} {_compare(found, option)}")
    choice = f"{stage.name}: cp = {stage.cp}, {stage.strategy}, {stage.micro_batches} micro-batches"
    return "; ".join([choice, *others])


def _compare(found: Estimate, other: Estimate) -> str:
    return f"takes {other.days / found.days - 1:+.1%}" if other.fits else f"misses by {shortfall(other)}"


def _faster_miss(search: Search) -> list[str]:
    """Of what would be faster and does not fit, that which lacks least."""
    found = search.found
    assert found
    faster = [one for one in search.tried if not one.fits and one.least_days < 0.99 * found.days]
    if not faster:
        return []
    near = min(faster, key=lambda one: one.fullest.fullness)
    gain = 1 - near.least_days / found.days
    differing = ", ".join(f"{KEYS[name]} = {near.choice.shown(name)}" for name in KEYS if not _same(near, found, name))
    return [f"nearest miss: {differing} would be up to {gain:.0%} faster, and misses by {shortfall(near.fullest)}"]


def _memory_reason(picked: Sequence[Estimate]) -> str:
    """What the fullest stage needs."""
    fullest = max(picked, key=lambda estimate: estimate.fullness)
    said = (f"{n.needed_bytes / GIB:.1f} of {n.usable_bytes / GIB:.1f} usable GiB of {n.of}" for n in fullest.needs)
    return f"{fullest.stage.name} is the fullest: {', '.join(said)}"


def _offload_reason(found: Candidate) -> list[str]:
    """What offload costs, if anything is offloaded."""
    costs = [f"{one.stage.name} {one.offload_seconds:.3g} s of {one.step_seconds:.3g}" for one in found.picked]
    offloads = any(found.choice.savings[1:])
    return ["offload costs, in a step: " + ", ".join(costs)] if offloads else []


def nothing_fits(search: Search) -> ConfigError:
    """The error where no choice fits: how near the nearest is, what binds it, and what it is."""
    near, cluster = search.nearest, search.cluster
    fullest, choice = near.fullest, near.choice
    keys = ", ".join(f"{KEYS[name]} = {choice.shown(name)}" for name in KEYS if name != "ep" or fullest.args.n_experts)
    used = " and ".join(
        f"{need.needed_bytes / GIB:.1f} GiB of {need.of}, of which {need.usable_bytes / GIB:.1f} are usable"
        for need in fullest.needs
    )
    fixes, copy = ["use more GPUs"], fullest.host["checkpoint"]
    if search.config.training.micro_batch_sequences > 1:
        fixes.append("a smaller training.micro_batch_sequences")
    if not fullest.fits_host:
        fixes.append("a host with more memory (--host-memory)")
        fixes += [f"checkpoint.asynchronous = false, which needs {copy / GIB:.1f} GiB less of it"] if copy else []
    return ConfigError(
        f"nothing fits on {cluster.ranks} x {cluster.name}. The nearest misses by {shortfall(fullest)}: stage "
        f"{fullest.stage.name} needs {used}, with cp = {fullest.stage.cp}, {keys}",
        fix=", or ".join(fixes),
    )
