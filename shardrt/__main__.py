"""`shardrt`, or `python -m shardrt`: one command for training, for prediction, and for what runs leave."""

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple, NoReturn

from shardrt import __version__
from shardrt.untrusted import printable, say

USAGE, DATA = 2, 65  # wrong words; a file is damaged, or none is there


class Command(NamedTuple):
    """A command.

    Its module has `add_to(commands)`, which adds the command to argparse's subparsers and sets its default
    `run`; or `main(arguments)`, which takes all words behind the command's name. Both give the exit code.
    """

    name: str
    module: str
    help: str


# A command more is a line here. Only the module of the command that runs is imported.
COMMANDS = {
    "Train and watch": (
        Command("train", "shardrt.train.command", "train a model on the ranks that mpirun starts"),
        Command("run", "shardrt.tools.run", "start a training command, and start it again when it fails"),
        Command("hub", "shardrt.parallel.hub_command", "relay DiLoCo's outer gradients between jobs"),
        Command("watch", "shardrt.tools.watch", "print a run's figures as they come"),
        Command("report", "shardrt.tools.report", "write one HTML page about a run"),
        Command("trace", "shardrt.tools.trace", "draw a step of a run, kept by --report.trace"),
        Command(
            "doctor", "shardrt.tools.doctor", "say what became of a run's ranks, or what this machine has"
        ),
    ),
    "Predict": (
        Command(
            "simulate", "shardrt.tools.simulate", "predict time, memory and traffic of a step on any machine"
        ),
        Command("plan", "shardrt.tools.plan", "find the fastest way to train within a memory limit"),
        Command("races", "shardrt.tools.races", "prove that the waits of a script order all uses of memory"),
        Command("prove", "shardrt.tools.prove", "prove that a script sums each gradient once"),
    ),
    "Measure": (
        Command(
            "bench",
            "shardrt.tools.bench",
            "time collectives, offload and kernels, and check each result",
        ),
    ),
    "Learn": (Command("learn", "shardrt.learn.command", "list twelve exercises, or grade an answer"),),
    "Checkpoints and data": (
        Command("ckpt", "shardrt.checkpoint.command", "list, verify, compare, prune or export checkpoints"),
        Command("data", "shardrt.train.data_command", "make a token file from text, or check one"),
        Command("config", "shardrt.tools.config", "turn a file of Accelerate or DeepSpeed into a recipe"),
    ),
}
EXAMPLES = (
    "mpirun -n 2 shardrt train --data my.txt --steps 500",
    "shardrt watch runs/NAME",
    "shardrt simulate --ranks 64 --machine h100-8 -- train --size gpt2-xl --batch-size 64",
)


def page() -> str:
    """What `shardrt --help` prints."""
    lines = ["usage: shardrt COMMAND ...", ""]
    lines += ["Trains models on many ranks, each of which keeps a shard (FSDP, ZeRO-3)."]
    for group, commands in COMMANDS.items():
        lines += ["", f"{group}:", *(f"  {command.name:9} {command.help}" for command in commands)]
    lines += ["", "Examples:", *(f"  {example}" for example in EXAMPLES), ""]
    lines += [
        "`shardrt COMMAND --help` lists the options of a command, `shardrt --version` prints the version."
    ]
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """The bad argument may be a file name that a shell has put there for a `*`."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def parser_of(command: Command) -> argparse.ArgumentParser:
    """The parser of `shardrt COMMAND ...`, which knows no other command."""
    parser = _Parser(prog="shardrt")
    import_module(command.module).add_to(parser.add_subparsers(required=True))
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run one command; gives the exit code."""
    name = arguments[0] if arguments else "--help"
    known = {command.name: command for commands in COMMANDS.values() for command in commands}
    if name not in (*known, "-h", "--help", "--version"):
        near = get_close_matches(name, known, 1)
        hint = f"perhaps you meant {near[0]}" if near else "`shardrt --help` lists the commands"
        say(f"error: shardrt has no command {name!r}; {hint}", file=sys.stderr)
        return USAGE
    if name in known and hasattr(module := import_module(known[name].module), "main"):
        return module.main(arguments[1:])
    try:
        if name not in known:
            say(f"shardrt {__version__}" if name == "--version" else page(), lines=True)
            return 0
        options = parser_of(known[name]).parse_args(arguments)
        return options.run(options)
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0
    except _bad_input() as error:
        from shardrt.train.errors import describe_error

        say(f"error: {describe_error(error)}", file=sys.stderr)
        return DATA


def _bad_input() -> tuple[type[Exception], ...]:
    """The errors of files that can't be used. Imported when there is an error: `--help` needs none."""
    from shardrt.checkpoint.manifest import Damaged
    from shardrt.tools.runs import BadRun
    from shardrt.train.tokens import BadTokens
    from shardrt.untrusted import Refused

    return Damaged, BadTokens, BadRun, Refused, OSError


def entry() -> int:
    """The command `shardrt`."""
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(entry())
