"""``python scripts/bench``: the command line, of an environment that has the package.

The bar for speed, the cost model, what small calls are made of, what groups cost to make, and a simulator of many
hosts. Most are runs of the package's own benchmark (python -m c10d_custom bench), or time as it does."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: its modules are of the package `bench`

from bench import (  # noqa: E402
    bar,
    beside,
    call_steps,
    cost_check,
    ddp,
    groups,
    libraries,
    model_command,
    models,
    serving,
    small_calls,
)
from c10d_custom.bench import command, ranks  # noqa: E402
from c10d_custom.bench.timing import Plan  # noqa: E402

_MODELS = "256x4,1024x6,2048x6"


def _sizes_of_groups(text: str) -> tuple[int, ...]:
    sizes = tuple(int(n) for n in text.split(","))
    if min(sizes) < 2:
        raise argparse.ArgumentTypeError(f"{text}: numbers of ranks, at least 2, as in 2,4,8")
    return sizes


def _against_groups(text: str) -> tuple[str, ...]:
    names = command.backends(text)
    if name := groups.refused(names):
        raise argparse.ArgumentTypeError(f"{name} makes no groups")
    return names


def _models(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if not models.known(name)]:
        named = ", ".join(models.NAMED)
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: WIDTHxLAYERS, as in {_MODELS}; or {named}")
    return names


def _plan(args: Any) -> Plan:
    return Plan(rounds=args.rounds, seconds=args.seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python scripts/bench", description=(__doc__ or "").split("\n\n")[1])
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")

    def add(name: str, what: str, run: Any, *options: str, **defaults: Any) -> argparse.ArgumentParser:
        """A command with those of the common options that it takes."""
        added: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what)
        common: dict[str, dict[str, Any]] = {
            "--ranks": dict(type=int, default=2, help="processes to start (default: %(default)s)"),
            "--against": dict(type=command.backends, default="gloo", metavar="NAME[,...]", help="default: %(default)s"),
            "--rounds": dict(type=command.positive, default=5, help="blocks of each (default: %(default)s)"),
            "--seconds": dict(type=float, default=0.15, help="length of a block, about (default: %(default)s)"),
            "--busy": dict(type=int, default=0, metavar="N", help="meanwhile N more processes burn a core each"),
            "--json": dict(metavar="FILE", help="also write the figures, and what they were measured on"),
        }
        for option in options:
            short = ("-r",) if option == "--ranks" else ()
            added.add_argument(*short, option, **{**common[option], **defaults.get(option[2:], {})})
        added.set_defaults(run=run)
        return added

    add(
        "bar",
        "each row of the project's bar for speed: goal, figure, met or missed",
        lambda args: bar.main(args.busy, args.json),
        *("--busy", "--json"),
    )
    add(
        "cost",
        "the cost model (docs/internals/cost-model.md) beside measurements at 2, 4, 8 and 16 ranks",
        lambda args: cost_check.main(args.busy, args.json),
        *("--busy", "--json"),
    )
    add(
        "steps",
        "where the time of a small synchronous call goes, from torch's Python to the other ranks",
        lambda args: ranks.run(call_steps.run, args.ranks, call_steps.CallSteps(_plan(args), args.json)),
        *("--ranks", "--rounds", "--seconds", "--json"),
    )
    add(
        "small-calls",
        "all_reduce, barrier and messages of a few bytes, asynchronous ones and several under way, and the steps of an "
        "asynchronous call",
        lambda args: ranks.run(
            small_calls.run, args.ranks, small_calls.SmallCalls(args.against, _plan(args), args.json)
        ),
        *("--ranks", "--against", "--rounds", "--seconds", "--json"),
    )
    add(
        "beside",
        "what large asynchronous all_reduces cost a loop of matmuls, with one thread a rank and with as many as it has "
        "by default",
        lambda args: ranks.run(beside.run, args.ranks, beside.Beside(args.rounds, args.json)),
        *("--ranks", "--rounds", "--json"),
        rounds=dict(help="turns of each (default: %(default)s)"),
    )
    made = add(
        "groups",
        "what groups cost to make, by init_process_group and new_group, and to call first",
        lambda args: groups.main(groups.Groups(args.sizes, args.against, args.rounds, args.busy, args.json)),
        *("--against", "--rounds", "--busy", "--json"),
        against=dict(type=_against_groups),
        rounds=dict(help="how often each backend starts ranks (default: %(default)s)"),
    )
    made.add_argument("sizes", type=_sizes_of_groups, nargs="?", default="2,4,8", metavar="RANKS[,...]")
    trained = add(
        "ddp",
        "DDP steps, and what communication costs them",
        lambda args: ranks.run(
            ddp.run,
            args.ranks,
            ddp.Ddp(args.models, args.batch, args.against, args.busy, args.rounds * args.seconds * 10, args.json),
        ),
        *("--ranks", "--against", "--rounds", "--seconds", "--busy", "--json"),
    )
    trained.add_argument(
        "models",
        type=_models,
        nargs="?",
        default=_MODELS,
        metavar="MODEL[,...]",
        help=f"of so many Linear layers (WIDTHxLAYERS), and of {', '.join(models.NAMED)} (default: %(default)s)",
    )
    trained.add_argument(
        "--batch", type=command.positive, default=32, help="rows of each rank's batch (default: %(default)s)"
    )
    served = add(
        "vllm",
        "tokens a second of vLLM with its own kernel, gloo and this backend, on one host and over two emulated ones",
        lambda args: serving.main(
            serving.Serving(
                (args.place,) if args.place else tuple(serving.PLACES),
                args.rounds,
                args.json,
                args.model,
                args.compiled,
            )
        ),
        *("--rounds", "--json"),
        rounds=dict(help="turns of each (default: %(default)s)"),
    )
    served.add_argument("place", choices=serving.PLACES, nargs="?", help="where (default: each)")
    served.add_argument("--model", default="512x12", metavar="HIDDENxLAYERS", help="default: %(default)s")
    served.add_argument("--compiled", action="store_true", help="by torch.compile, as vLLM does by default")
    model_command.add_to(commands)
    command.add_to(commands, "sweep", libraries.run)
    return parser


def main() -> int:
    """The exit status of the command that the command line names; argparse exits with 2 where it cannot be."""
    parser = _parser()
    args = parser.parse_args()
    if args.command in ("bar", "cost", "groups", "vllm") and ranks.launched():
        parser.error(f"{args.command} launches runs of its own: not under torchrun or mpirun")
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
