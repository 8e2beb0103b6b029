"""[[curriculum.stages]] with everything worked out that the mesh decides."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_cp.config import Config
from torchtitan_cp.config.degrees import Degrees
from torchtitan_cp.config.sections import Rope, StageLR


@dataclass(frozen=True)
class StagePlan:
    """One stage, ready to run.

    Attributes:
        index: place in the curriculum, from 0.
        seq_len: S, tokens of a sequence.
        cp: context-parallel degree; dp: ranks (groups of cp) that hold different sequences.
        strategy: exchange by name; all_to_all_ranks: ranks that trade heads, for hybrid.
        first_step: optimizer step of the run that opens it; steps: how many it has.
        micro_batch_sequences: sequences of one forward on one data-parallel rank.
        micro_batches: forwards of one optimizer step on one rank.
        global_batch_tokens: tokens of one optimizer step over all ranks.
    """

    index: int
    name: str
    seq_len: int
    cp: int
    dp: int
    strategy: str
    all_to_all_ranks: int
    first_step: int
    steps: int
    micro_batch_sequences: int
    micro_batches: int
    global_batch_tokens: int
    rope: Rope
    lr: StageLR | None

    @property
    def last_step(self) -> int:
        """One past its last optimizer step."""
        return self.first_step + self.steps


def resolve_stages(config: Config, degrees: Degrees) -> tuple[StagePlan, ...]:
    """Work out every stage of a config that has passed `check_config`."""
    plans: list[StagePlan] = []
    for index, stage in enumerate(config.curriculum.stages):
        dp, micro = degrees.stage_dp(stage), config.training.micro_batch_sequences
        cp, strategy = degrees.stage_cp(stage), stage.strategy or config.context_parallel.strategy
        plans.append(
            StagePlan(
                index=index,
                name=stage.name or _length_name(stage.seq_len),
                seq_len=stage.seq_len,
                cp=cp,
                dp=dp,
                strategy=strategy,
                all_to_all_ranks=config.context_parallel.all_to_all_ranks if strategy == "hybrid" and cp > 1 else 1,
                first_step=plans[-1].last_step if plans else 0,
                steps=stage.steps or -(-stage.tokens // stage.global_batch_tokens),
                micro_batch_sequences=micro,
                micro_batches=stage.global_batch_tokens // (stage.seq_len * dp * micro),
                global_batch_tokens=stage.global_batch_tokens,
                rope=stage.rope,
                lr=stage.lr,
            )
        )
    return tuple(plans)


def stage_of(plans: Sequence[StagePlan], step: int) -> StagePlan:
    """The stage that optimizer step `step` (from 0) belongs to; the last one when all are done."""
    for plan in plans:
        if step < plan.last_step:
            return plan
    return plans[-1]


def _length_name(seq_len: int) -> str:
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if seq_len % size == 0:
            return f"{seq_len // size}{unit}"
    return str(seq_len)
