"""`hf-mot`: parses the command line, runs one command, and turns errors into one line."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from hf_mot import __version__
from hf_mot.cli import analyze, capture, catalog, demo, evaluate, fit, generate, inspect, push, search_channels, train
from hf_mot.names import closest

COMMANDS = {
    "demo": demo,
    "fit": fit,
    "train": train,
    "search-channels": search_channels,
    "evaluate": evaluate,
    "analyze": analyze,
    "generate": generate,
    "inspect": inspect,
    "capture": capture,
    "push": push,
    "list": catalog,
}


def main(argv: Sequence[str] | None = None) -> int:
    """
    Runs `hf-mot`.

    Args:
        argv (`Sequence[str]`, *optional*, defaults to `sys.argv[1:]`): The arguments.

    Returns:
        `int`: The exit code: 0, 1 after an error, 2 for a command line that cannot be understood (as `SystemExit`),
        130 when interrupted.
    """
    try:
        try:
            return _run(sys.argv[1:] if argv is None else list(argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left (`| head`): nothing more to say, nor for Python when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: list[str]) -> int:
    args = parse(argv)
    name = f"hf-mot {args.command}"
    try:
        set_up_logging(args.debug)
        from hf_mot import MoTModel  # noqa: F401  a translator is saved with its code once it is registered

        return COMMANDS[args.command].run(args)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        if args.debug:
            raise
        print(f"\n{name}: interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        if args.debug:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"{name}: error: {message}", file=sys.stderr)
        return 1


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hf-mot",
        description="One language model reads what another has already read: KV-cache translation.",
        epilog="`hf-mot COMMAND --help` explains a command. Start with `hf-mot demo`.",
    )
    parser.add_argument("--version", action="version", version=f"hf-mot {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        description = f"{module.HELP[:1].upper()}{module.HELP[1:]}."
        command = commands.add_parser(name, help=module.HELP, description=description)
        module.add_arguments(command)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error, and all logs")
    wanted = next((arg for arg in argv if not arg.startswith("-")), None)
    if wanted is not None and wanted not in COMMANDS:
        close = closest(wanted, COMMANDS)
        hint = f"did you mean {close}?" if close else f"choose from {', '.join(COMMANDS)}"
        parser.error(f"{wanted!r} is no command: {hint}")
    args = parser.parse_args(argv)
    args.argv = argv
    return args


def set_up_logging(debug: bool) -> None:
    """The package speaks at info level on standard error; other libraries only when something fails, or in `debug`."""
    logger = logging.getLogger("hf_mot")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    if debug:
        return
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    downloads_shown = not are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()  # loading weights takes seconds; it hides the Hub's bars too
    if downloads_shown:
        enable_progress_bars()  # a download takes minutes
    transformers_logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
