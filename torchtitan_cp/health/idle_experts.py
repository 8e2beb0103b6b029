"""Names experts that no token reaches any more."""

import torch
from torch import Tensor

MAX_NAMED = 20  # in one warning


class IdleExperts:
    """Counts for each expert the steps in a row without a token.

    The counts stay on the device, and the host waits for them only when it asks. They are in no checkpoint.

    Args:
        steps: an expert is reported after this many consecutive steps without a token; 0: never.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._idle_steps: Tensor | int = 0
        self._unread = 0  # steps since the last call of `find`

    def record_healthy_step(self, counts: Tensor) -> None:
        """Count a step that was taken.

        Args:
            counts: `[layers, X]`, tokens that each expert was sent, over all ranks; 0 in layers without experts.
        """
        idle = (counts == 0) & counts.any(1, keepdim=True)
        self._idle_steps = (self._idle_steps + 1) * idle
        self._unread += 1

    def find(self) -> str:
        """A warning that names the experts that have become idle since the last call; empty if none has."""
        idle, unread, self._unread = torch.as_tensor(self._idle_steps), self._unread, 0
        # An expert that has been idle for longer is already named.
        found = ((idle >= self.steps) & (idle < self.steps + unread)).nonzero().tolist()
        if not found or not self.steps:
            return ""
        named = ", ".join(f"expert {expert} of layer {layer}" for layer, expert in found[:MAX_NAMED])
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        return f"no token has reached {named}{more} for {self.steps} steps: see health.md, idle experts"
