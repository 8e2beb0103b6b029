"""What the environment says of the process that started this one: a rank of a job, or not."""

import os
from contextlib import suppress
from pathlib import Path

# Process id of the launcher of this node's ranks.
LAUNCHER_VARIABLE = "TORCHTITAN_CP_LAUNCHER"
# What torch needs to join a job, and what torchrun's agent sets beside it.
PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
AGENT_RUN = "TORCHELASTIC_RUN_ID"
IN_NODE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
ROLES = ("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE")
PREFIXES = ("TORCHELASTIC_", "TORCHTITAN_CP_")


def is_launched() -> bool:
    """Whether torchrun, or this program's launcher, started this process as a rank.

    Not if the variables of a rank are only inherited: from a rank whose command this is, or from an operator or a
    shell that sets RANK and WORLD_SIZE for whatever runs there.
    """
    return AGENT_RUN in os.environ and not _is_inherited((*PLACE, AGENT_RUN))


def _is_inherited(names: tuple[str, ...]) -> bool:
    """Whether the parent process was itself started with these variables. False where the system does not say."""
    with suppress(OSError):
        parent = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        return all(os.fsencode(f"{name}={os.environ.get(name)}") in parent for name in names)
    return False


def forget_rank() -> bool:
    """Remove a rank's variables from the environment, for a command that uses one process.

    torch and other libraries would join that job, and wait for its ranks.

    Returns:
        whether RANK was set.
    """
    found = "RANK" in os.environ
    for name in [name for name in os.environ if name in (*PLACE, *IN_NODE, *ROLES) or name.startswith(PREFIXES)]:
        del os.environ[name]
    return found


def launcher_pid() -> int:
    """Process id of the launcher or torchrun that started this rank; 0 if neither did."""
    if LAUNCHER_VARIABLE in os.environ:
        return int(os.environ[LAUNCHER_VARIABLE])
    return os.getppid() if AGENT_RUN in os.environ else 0


def has_ended(parent: int) -> bool:
    """Whether the process that started this one has ended, though its own parent may not know yet."""
    if os.getppid() == parent:
        return False
    with suppress(OSError):
        return Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    try:
        os.kill(parent, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
