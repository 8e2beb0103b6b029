"""`torchtitan-cp COMMAND …`, or `python -m torchtitan_cp COMMAND …`: the entry points under one name."""

import signal
import sys

from torchtitan_cp.cli.options import import_without_gc

# The module of each command, imported on demand, as the launcher starts without torch.
COMMANDS = {
    "train": ("torchtitan_cp.cli.train", "train a config, on this node's ranks"),
    "check": ("torchtitan_cp.cli.check", "say whether a config would run, or what is wrong with it"),
    "preview": ("torchtitan_cp.cli.preview", "print samples of a stage as the model gets them"),
    "prepare": ("torchtitan_cp.cli.prepare", "download and tokenize what a config trains on, without a GPU"),
    "plan": ("torchtitan_cp.cli.plan", "estimate memory, communication and time of a config on a cluster"),
    "doctor": ("torchtitan_cp.cli.doctor", "say whether context parallelism is safe for a config's model"),
    "evaluate": ("torchtitan_cp.cli.evaluate", "measure a checkpoint: losses, context gain, retrieval"),
    "generate": ("torchtitan_cp.cli.generate", "continue a text, or answer in a conversation"),
    "export": ("torchtitan_cp.cli.export", "write a checkpoint for transformers"),
    "replay": ("torchtitan_cp.cli.replay", "run the module behind a bad step again, on one process"),
}


def main(arguments: list[str] | None = None) -> int:
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in COMMANDS:
        handler = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # an import would end in a traceback, or swallow Ctrl-C
        module = import_without_gc(COMMANDS[command][0])
        signal.signal(signal.SIGINT, handler)
        return int(module.main(rest))
    width = max(map(len, COMMANDS))
    about = "\n".join(f"  {name:<{width}}  {says}" for name, (_, says) in COMMANDS.items())
    print(f"usage: torchtitan-cp COMMAND ... (COMMAND --help says what it takes)\n\n{about}")
    if command in ("-h", "--help"):
        return 0
    print(f"error: there is no command {command!r}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
