"""Push a run, a chunk set or a metric folder to the Hub, with its card, in one commit.

    python -m hub_cards.push RUN --repo_id me/b-table --baseline BASELINE_RUN --checkpoints
    python -m hub_cards.push CHUNK_SET --repo_id me/long-documents --license cc-by-4.0
    python -m hub_cards.push evaluation/class_bpb --repo_id me/class_bpb

The card is filled from the files and checked before anything is sent. A second push changes only
what changed, and goes on where a cut one stopped. `--dry_run` writes the exact folder, lists it,
and needs neither network nor token. The token is the one of `hf auth login` or HF_TOKEN.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import logging, validate_repo_id

from hub_cards.command_line import normalise_flags, run_command
from hub_cards.contents import (
    Contents,
    Options,
    checkpoint_contents,
    data_contents,
    kind_of,
    metric_contents,
    model_contents,
)
from hub_cards.upload import create_repository, push

_REPO_TYPES = {"run": "model", "chunk_set": "dataset", "parquet": "dataset", "metric": "space"}


def prepare(source: Path, options: Options, out: Path, checkpoints: bool = False) -> list[Contents]:
    """Make the folders of every revision below `out`; nothing is sent.

    Raises:
        ValueError: if the source is none that can be pushed, or something in it is refused.
    """
    if not source.is_dir():
        raise ValueError(f"{source} must be a folder; it is not. Give a run, chunk set or metric.")
    try:
        validate_repo_id(options.repo_id)
    except ValueError as error:
        raise ValueError(f"repo_id must be OWNER/NAME; {error}") from None
    if "/" not in options.repo_id:
        raise ValueError(f"repo_id must be OWNER/NAME; got {options.repo_id}. Add the owner.")
    kind = kind_of(source)
    if kind != "run" and (checkpoints or options.baseline):
        raise ValueError(f"--checkpoints and --baseline are for runs; {source} is a {kind}.")
    if kind == "run":
        contents = [model_contents(source, options, out)]
        return contents + (checkpoint_contents(source, options, out) if checkpoints else [])
    if kind == "metric":
        return [metric_contents(source, options, out)]
    if options.license is None:
        raise ValueError(
            "a data set needs --license, since the documents' authors decide it; got none. Use an "
            "identifier of the Hub, such as cc-by-4.0, or `other` with --license_name."
        )
    return [data_contents(source, options, out)]


def show(contents: Contents) -> None:
    """List a revision's files with their sizes."""
    print(f"{contents.branch}: {contents.title}")
    for path in sorted(contents.folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(contents.folder).as_posix()
            print(f"  {path.stat().st_size:>13,}  {name}")
    if contents.left_out:
        print(f"  not on the list, stays here: {', '.join(contents.left_out)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hub_cards.push",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "source", type=Path, metavar="RUN|CHUNK_SET|METRIC_FOLDER", help="what to push"
    )
    parser.add_argument("--repo_id", required=True, help="OWNER/NAME on the Hub")
    parser.add_argument("--baseline", type=Path, help="the run that a run's gains are against")
    parser.add_argument(
        "--checkpoints",
        action="store_true",
        help="also push training checkpoints, as branches such as update0500-262M-tokens",
    )
    parser.add_argument("--dry_run", action="store_true", help="write and list the folder; no more")
    parser.add_argument(
        "--out", type=Path, help="where --dry_run writes (hub_push/NAME of the repository)"
    )
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument(
        "--license", help="identifier of the Hub's list (models: apache-2.0; data: must be given)"
    )
    parser.add_argument("--license_name", help="for --license other")
    return parser


def _dry_run(arguments: argparse.Namespace, options: Options) -> None:
    out = arguments.out or Path("hub_push") / arguments.repo_id.split("/")[-1]
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} must be empty or absent; it is not. Remove it, or give --out.")
    with tempfile.TemporaryDirectory(prefix="hub_push_") as temporary:
        prepared = prepare(arguments.source, options, Path(temporary), arguments.checkpoints)
        for contents in prepared:
            show(contents)
            shutil.copytree(contents.folder, out / contents.branch)
    print(f"written to {out}; nothing was sent")


def _push(arguments: argparse.Namespace, options: Options) -> None:
    # The library warns of retries with signed addresses, and of Parquet in a model's repository.
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", message="It seems that you are about to commit a data file")
    with tempfile.TemporaryDirectory(prefix="hub_push_") as temporary:
        prepared = prepare(arguments.source, options, Path(temporary), arguments.checkpoints)
        repo_type = _REPO_TYPES[kind_of(arguments.source)]
        api = HfApi()
        create_repository(api, options.repo_id, repo_type, arguments.private)
        for contents in prepared:
            done = push(api, options.repo_id, repo_type, contents)
            if done.commit is None:
                print(f"{done.branch}: nothing to change")
                continue
            print(f"{done.branch}: {len(done.added)} files sent, {len(done.deleted)} deleted")
            for name in contents.left_out:
                print(f"  not on the list, stays here: {name}")
    prefix = {"model": "", "dataset": "datasets/", "space": "spaces/"}[repo_type]
    print(f"{api.endpoint}/{prefix}{options.repo_id}")


def main(argv: Sequence[str] | None = None) -> int:
    """Push what the command line names; returns the exit code."""
    arguments = _parser().parse_args(normalise_flags(sys.argv[1:] if argv is None else argv))
    options = Options(
        repo_id=arguments.repo_id,
        baseline=arguments.baseline,
        license=arguments.license,
        license_name=arguments.license_name,
    )
    return run_command(lambda: (_dry_run if arguments.dry_run else _push)(arguments, options))


if __name__ == "__main__":
    sys.exit(main())
