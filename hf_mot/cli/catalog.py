"""`hf-mot list`: translators on the Hugging Face Hub."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hf_mot.cli import check_output_file

HELP = "list the translators on the Hugging Face Hub"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", metavar="S", help="only those of this source model, by its Hub id or demo name")
    parser.add_argument("--target", metavar="T", help="only those of this target model, likewise")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="as many at most [20]")
    parser.add_argument("--json", metavar="PATH", help="also write the list to this file")


def run(args: argparse.Namespace) -> int:
    check_output_file(args.json, "--json")
    if args.limit < 1:
        raise ValueError(f"`--limit` must be at least 1, got {args.limit}.")

    from hf_mot.evaluation import save_report
    from hf_mot.hub.catalog import find_translators

    entries = find_translators(args.source, args.target, limit=args.limit)
    if args.json is not None:
        rows = [{key: value for key, value in asdict(entry).items() if value is not None} for entry in entries]
        save_report({"translators": rows}, args.json)
    print(format_entries(entries) if entries else "No translator found. Fit one: hf-mot fit --help")
    return 0


def format_entries(entries: Sequence[Any]) -> str:
    """One aligned line a translator."""
    rows = [("translator", "source → target", "downloads")]
    for entry in entries:
        name = f"{entry.repo_id} (private)" if entry.private else entry.repo_id
        pair = f"{entry.source or 'a local model'} → {entry.target or 'a local model'}"
        rows.append((name, pair, "" if entry.downloads is None else f"{entry.downloads:,}"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {pair:<{widths[1]}}  {count}".rstrip() for name, pair, count in rows)
