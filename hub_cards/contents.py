"""What a run, a chunk set and a metric folder become on the Hub."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from hub_cards import staging
from hub_cards.cards import model_card, read_recipe, shared_recipe
from hub_cards.dataset_cards import dataset_card
from hub_cards.rendering import check_license, check_sections, render
from hub_cards.run_files import file_sha256, read_json


@dataclass(frozen=True)
class Options:
    """What the command line says about a push.

    Attributes:
        repo_id: OWNER/NAME.
        baseline: the run that a run is compared with.
        license, license_name: of the repository; None keeps the default of its kind.
    """

    repo_id: str
    baseline: Path | None = None
    license: str | None = None
    license_name: str | None = None


@dataclass(frozen=True)
class Contents:
    """One revision, ready to go.

    Attributes:
        folder: holds exactly the files of the revision.
        branch: `main`, or a checkpoint's.
        title: of the commit.
        owned: patterns of the files that a push may replace or delete.
        left_out: files of the source that are on no list.
    """

    folder: Path
    branch: str
    title: str
    owned: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def kind_of(source: Path) -> str:
    """`run`, `chunk_set`, `parquet` (an exported chunk set) or `metric`.

    Raises:
        ValueError: if it is none of them.
    """
    if (source / "config.yaml").is_file() and (source / "final").is_dir():
        return "run"
    if (source / "counts.json").is_file():
        return "parquet"
    if (source / "manifest.json").is_file():
        return "chunk_set"
    if (source / f"{source.resolve().name}.py").is_file() and (source / "README.md").is_file():
        return "metric"
    raise ValueError(
        f"{source} must be a finished run (config.yaml, final/), a chunk set (manifest.json), its "
        "Parquet export (counts.json) or a metric folder (NAME/NAME.py, README.md); it is none."
    )


def model_contents(run: Path, options: Options, out: Path) -> Contents:
    """The final model with card, records, recipe, results and learning curve."""
    folder = out / "main"
    if (run / "final").is_symlink() or (run / "records").is_symlink():
        raise ValueError(f"final/ and records/ of {run} must be folders; found a symbolic link.")
    card = model_card(
        run,
        options.baseline,
        options.repo_id,
        options.license or "apache-2.0",
        options.license_name,
        figures=folder,
    )
    patterns = (*staging.MODEL_FILES, *staging.TOKENIZER_FILES)
    left_out = staging.copy_allowed(run / "final", folder, patterns)
    for required in ("model.safetensors", "config.json", "generation_config.json"):
        _require(folder, required, run / "final")
    _require(folder, "tokenizer.json", run / "final")
    staging.check_remote_code(folder)
    expected = read_json(run / "results.json", "finish the training first")["final_sha256"]
    if (found := file_sha256(folder / "model.safetensors")) != expected:
        raise ValueError(
            f"final/model.safetensors must be the file that results.json describes "
            f"({expected[:12]}); its sha256 is {found[:12]}. Train again, or restore the file."
        )
    for name in ("results.json", "gains.json", "metrics.jsonl"):
        if (run / name).exists() or (run / name).is_symlink():
            staging.copy_file(run / name, folder / name)
    left_out += staging.copy_allowed(run / "records", folder / "records", staging.RECORD_FILES)
    (folder / "recipe.yaml").write_text(shared_recipe(read_recipe(run)), encoding="utf-8")
    (folder / "README.md").write_text(str(card), encoding="utf-8")
    for name in ("recipe.yaml", "README.md"):
        staging.check_content(folder / name, name)
    own = {"README.md", "recipe.yaml", "figures/learning_curve.png"}
    own |= {"figures/gain_by_target_cell.png"}
    shown = tuple(name for name in left_out if name not in own)
    name = read_recipe(run)["name"]
    return Contents(folder, "main", f"Upload {name}", staging.MODEL_REPOSITORY, shown)


def _require(folder: Path, name: str, source: Path) -> None:
    if not (folder / name).is_file():
        raise ValueError(f"{source} must hold {name}; it does not. Finish the training again.")


def checkpoint_contents(run: Path, options: Options, out: Path) -> list[Contents]:
    """Each training checkpoint as a revision: weights, code, tokenizer and a short card.

    Optimizer states stay at home: they are twice as large as the weights.

    Raises:
        ValueError: if there are none.
    """
    recipe = read_recipe(run)
    found = sorted(path for path in (run / "checkpoints").glob("update_*") if path.is_dir())
    if not found:
        raise ValueError(f"--checkpoints needs {run}/checkpoints/update_*; there are none.")
    contents = []
    for path in found:
        if path.is_symlink() or not re.fullmatch(r"update_\d+", path.name):
            raise ValueError(f"{path} must be a folder update_N; it is not. Move it away.")
        update = int(path.name.removeprefix("update_"))
        tokens = update * recipe["training"]["tokens_per_update"]
        branch = branch_name(update, tokens)
        folder = out / branch
        left_out = staging.copy_allowed(path, folder, staging.MODEL_FILES)
        _require(folder, "model.safetensors", path)
        staging.copy_allowed(run / "final", folder, staging.TOKENIZER_FILES)
        staging.check_remote_code(folder)
        variables = {
            "license": options.license or "apache-2.0",
            "license_name": options.license_name,
            "name": recipe["name"],
            "repo_id": options.repo_id,
            "branch": branch,
            "update": f"{update:,}",
            "tokens": f"{tokens:,}",
            "num_updates": f"{recipe['training']['num_updates']:,}",
        }
        card = render("checkpoint_card.md.jinja", variables)
        (folder / "README.md").write_text(card, encoding="utf-8")
        title = f"Upload {recipe['name']} after {update:,} updates"
        kept = {"state.json", "optimizer.safetensors"}
        shown = tuple(name for name in left_out if name not in kept)
        contents.append(Contents(folder, branch, title, staging.MODEL_REPOSITORY, shown))
    return contents


def branch_name(update: int, tokens: int) -> str:
    """`update0500-262M-tokens`; thousands below a million."""
    count = f"{tokens / 1e6:.0f}M" if tokens >= 1_000_000 else f"{tokens / 1e3:.0f}K"
    return f"update{update:04d}-{count}-tokens"


def data_contents(source: Path, options: Options, out: Path) -> Contents:
    """A chunk set as Parquet with its card; a set that is not exported yet is exported first."""
    folder, exported = out / "main", source
    if kind_of(source) == "chunk_set":
        exported = out / "export"
        command = [sys.executable, "-m", "data_scripts.export", str(source), "--out", str(exported)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ValueError(f"{source} must be exported before the push: {reason}")
    counts = read_json(exported / "counts.json", "run python -m data_scripts.export")
    listed = {name for split in counts["splits"].values() for name in split["files"]}
    left_out = staging.copy_allowed(exported, folder, staging.DATA_FILES)
    for path in sorted(folder.rglob("*.parquet")):
        name = path.relative_to(folder).as_posix()
        if name not in listed:
            raise ValueError(f"counts.json must list {name}; it does not. Export the set again.")
    for split in counts["splits"].values():
        for name, entry in split["files"].items():
            _require(folder, name, exported)
            if file_sha256(folder / name) != entry["sha256"]:
                raise ValueError(f"{name} must be as counts.json says; it changed. Export again.")
    card = dataset_card(exported, options.repo_id, options.license, options.license_name)
    (folder / "README.md").write_text(card, encoding="utf-8")
    title = f"Upload chunk set {counts['fingerprint'][:12]}"
    return Contents(folder, "main", title, staging.DATA_FILES, tuple(left_out))


def metric_contents(source: Path, options: Options, out: Path) -> Contents:
    """A metric folder as a Space; its card loads the metric by the repository's name.

    Raises:
        ValueError: if the repository's name is not the metric's, or the card has no Space's header.
    """
    folder, name = out / "main", source.resolve().name
    if options.repo_id.split("/")[-1] != name:
        raise ValueError(
            f"repo_id must end in /{name}, since evaluate.load looks for the file of that name; "
            f"got {options.repo_id}. Use OWNER/{name}."
        )
    left_out = staging.copy_allowed(source, folder, staging.METRIC_FILES)
    for required in ("README.md", "app.py", "requirements.txt", f"{name}.py"):
        _require(folder, required, source)
    text = (folder / "README.md").read_text("utf-8")
    check_sections(text.split("---", 2)[-1])
    for field in ("sdk:", "app_file:"):
        if field not in text.split("---", 2)[1]:
            raise ValueError(f"README.md of {source} must set {field} for a Space; it does not.")
    license = options.license or yaml.safe_load(text.split("---", 2)[1]).get("license")
    check_license(str(license), options.license_name)
    if options.license is not None:
        text = re.sub(r"(?m)^license: .*$", f"license: {options.license}", text, count=1)
    text = re.sub(
        r"evaluate\.load\(\"[^\"]+\"\)", f"evaluate.load({json.dumps(options.repo_id)})", text
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    return Contents(folder, "main", f"Upload {name}", staging.METRIC_FILES, tuple(left_out))
