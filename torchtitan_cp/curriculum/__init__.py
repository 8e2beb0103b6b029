"""The curriculum as pure arithmetic: stages, their ends, their rotary frequencies.

No tensors. Imports `config` at most.
"""

from torchtitan_cp.config.stages import ResolvedStage
from torchtitan_cp.curriculum.gate import judge
from torchtitan_cp.curriculum.rope import check_head_dim, describe_rope, rope_frequencies
from torchtitan_cp.curriculum.rope_changes import rope_notes
from torchtitan_cp.curriculum.stages import resolve_stages

__all__ = [
    "ResolvedStage",
    "check_head_dim",
    "describe_rope",
    "judge",
    "resolve_stages",
    "rope_frequencies",
    "rope_notes",
]
