"""`hf-mot push`: publishes a translator on the Hugging Face Hub."""

import argparse
from dataclasses import asdict
from typing import Any

from hf_mot.cli import check_output_file

HELP = "publish a translator on the Hugging Face Hub, with its card"

CARDS = {
    "rendered": "rendered from the config and the fit report",
    "minimal": "without figures, see above",
    "none": "none, see above: the earlier one, if any, stays",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("translator", metavar="DIR", help="folder of the translator, as hf-mot fit wrote it")
    parser.add_argument("repo_id", metavar="REPO", help="where to: owner/name; made if it does not exist")
    parser.add_argument("--private", action="store_true", help="make it a private repository")
    parser.add_argument("--create-pr", action="store_true", help="propose the files in a pull request")
    parser.add_argument("--revision", metavar="R", help="branch (made if it does not exist) or refs/pr/N [main]")
    parser.add_argument("--json", metavar="PATH", help="also write what was done to this file")


def run(args: argparse.Namespace) -> int:
    check_output_file(args.json, "--json")

    from hf_mot.evaluation import save_report
    from hf_mot.hub.publish import push

    done = push(args.translator, args.repo_id, private=args.private, create_pr=args.create_pr, revision=args.revision)
    if args.json is not None:
        save_report(asdict(done), args.json)
    print(format_push(done))
    return 0


def format_push(done: Any) -> str:
    """What was done, and how to load it."""
    if not done.changed:
        return f"{done.url} holds this translator already: nothing to do"
    revision = "" if done.revision == "main" else f', revision="{done.revision}"'
    code = [path for path in done.files if path.endswith("_mot.py")]
    files = [path for path in done.files if path not in code] + [f"{len(code)} files of code (*_mot.py)"]
    rows = [
        ("published", done.url),
        ("commit", f"{done.commit[:8]} on {done.revision}"),
        ("files", ", ".join(files)),
        ("card", CARDS[done.card]),
        ("removed", ", ".join(done.removed)),
        ("left out", "; ".join(f"{name} ({why})" for name, why in done.left_out.items())),
        ("load it", f'AutoModel.from_pretrained("{done.repo_id}"{revision})'),
    ]
    return "\n".join(f"{label:<11}{text}" for label, text in rows if text)
