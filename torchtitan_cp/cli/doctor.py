"""`torchtitan-cp doctor` says whether context parallelism is safe for a config's model, or which layer is at fault."""

from torchtitan_cp.cli import train
from torchtitan_cp.cli.options import at_least, config_parser, parse_with_overrides


def main(arguments: list[str]) -> int:
    parser = config_parser(
        "doctor",
        "Run a short sequence of a config's model on this node's ranks and on one process, and compare: a table of its "
        "layers, probes, and a verdict with the layer and class at fault (exit code 5).",
    )
    parser.add_argument(
        "--ranks",
        type=at_least(1),
        metavar="N",
        help="of this node, which all share the sequence (default: what run_train.sh would use)",
    )
    parser.add_argument(
        "--length", type=at_least(0), metavar="LENGTH", default=0, help="tokens (default: 256, or past every window)"
    )
    options, overrides = parse_with_overrides(parser, arguments)
    ranks = ["--ranks", str(options.ranks)] if options.ranks else []
    return train.main([options.config, *ranks, "--doctor", str(options.length), *overrides])
