"""When another rank dies: say so in one line, and leave the launcher time to name it."""

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

# What gloo and NCCL say of a peer that is gone or silent. Source: gloo's transport/tcp, ProcessGroupNCCL.
LOST_CONTACT = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|remote process exited|NCCL.*(error|abort)",
    re.IGNORECASE,
)
# torchrun looks at its processes every 0.1 s, and reports the first that failed: the dead one, if we linger.
GRACE_SECONDS = 10.0


class LostRankError(RuntimeError):
    """A collective failed because another rank is gone or silent."""


@contextmanager
def name_lost_ranks(timeout_seconds: float) -> Iterator[None]:
    """Turn a transport error into one line, after waiting for the launcher to see which rank died first.

    Args:
        timeout_seconds: how long collectives wait, for the message.

    Raises:
        LostRankError: in place of the transport's error.
    """
    try:
        yield
    except RuntimeError as error:
        if not LOST_CONTACT.search(str(error)):
            raise
        reason = str(error).strip().splitlines()[0]
        logger.error(
            "lost contact with another rank (%s). The launcher names the rank that died first below; a rank that "
            "hangs is given up after job.timeout_seconds = %g. Run the same command again to resume.",
            reason,
            timeout_seconds,
        )
        time.sleep(GRACE_SECONDS)
        raise LostRankError(reason) from None
