"""Errors a user can cause. Each carries its fix; the entry points print both and exit with code 2."""


class UserError(Exception):
    """A file, key, corpus or folder of the user is wrong.

    Args:
        message: what is wrong, naming the file, key or rank.
        fix: how to correct it; printed on its own line.
    """

    def __init__(self, message: str, *, fix: str = "") -> None:
        self.message, self.fix = message, fix
        super().__init__(f"{message}\n  fix: {fix}" if fix else message)


class ConfigError(UserError):
    """The TOML file, or an override on the command line, is wrong."""


def format_error(config: str, error: Exception) -> str:
    """The message an entry point prints: the path of the config, once, and the error.

    Args:
        config: its path as typed. Errors of load_config name it already; those of later checks do not.
    """
    return f"error: {error}" if config in str(error).partition("\n")[0] else f"error: {config}: {error}"
