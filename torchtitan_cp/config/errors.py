"""Errors a user can cause. Each carries the way out; the entry points print them and exit with code 2."""


class UserError(Exception):
    """Something in the user's hands is wrong: a file, a key, a corpus, a folder.

    Args:
        message: what is wrong, naming the file, key or rank.
        fix: how to mend it; printed on a line of its own.
    """

    def __init__(self, message: str, *, fix: str = "") -> None:
        self.message, self.fix = message, fix
        super().__init__(f"{message}\n  fix: {fix}" if fix else message)


class ConfigError(UserError):
    """The TOML file, or an override on the command line, is wrong."""


def format_error(config: str, error: Exception) -> str:
    """What an entry point prints of an error: the config it was given, once, and what is wrong.

    Args:
        config: its path as it was typed. What load_config raises names it; what the checks after it raise does not.
    """
    return f"error: {error}" if config in str(error).partition("\n")[0] else f"error: {config}: {error}"
