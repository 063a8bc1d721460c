"""Fill the card of a chunk set's Parquet export from its manifest.json and counts.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from hub_cards.rendering import check_license, check_number, license_title, render, tables
from hub_cards.run_files import file_sha256, read_json

_SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"))


def dataset_card(
    exported: Path, repo_id: str, license: str, license_name: str | None = None
) -> str:
    """The card of a Parquet folder that `data_scripts.export` wrote.

    Args:
        exported: the folder: counts.json, manifest.json, Parquet files.
        repo_id: where it will be on the Hub.
        license: of the data, an identifier that the Hub knows.
        license_name: the licence's name, for `other`.

    Raises:
        ValueError: if a file is missing, the manifest is another one than the export's, or the
            licence is unknown.
    """
    check_license(license, license_name)
    counts = read_json(exported / "counts.json", "run python -m data_scripts.export")
    manifest = read_json(exported / "manifest.json", "run python -m data_scripts.export")
    found = file_sha256(exported / "manifest.json")
    if found != counts["fingerprint"]:
        raise ValueError(
            f"manifest.json must have the sha256 of counts.json, {counts['fingerprint'][:12]}; "
            f"found {found[:12]}. Export the set again."
        )
    splits = {name: manifest["splits"][name] | counts["splits"][name] for name in counts["splits"]}
    withheld = [name for name in manifest["splits"] if name not in splits]
    example_config = counts["configs"][0]
    text = render(
        "dataset_card.md.jinja",
        {
            "metadata": _metadata(counts, license, license_name),
            "name": repo_id.split("/")[-1],
            "repo_id": repo_id,
            "chunk_length": f"{counts['chunk_length']:,}",
            "vocab_size": f"{counts['vocab_size']:,}",
            "bos_token_id": counts["bos_token_id"],
            "min_tokens": f"{manifest['min_tokens']:,}",
            "sources": manifest["notes"] or [f"source `{manifest['source']}`"],
            "hub": _hub_source(manifest),
            "splits": [_split_row(name, entry) for name, entry in splits.items()],
            "shards": [_shard_row(name, entry) for name, entry in splits.items()],
            "overlaps": [
                _overlap_row(name, entry)
                for name, entry in splits.items()
                if "num_documents_before_overlaps" in entry
            ],
            "withheld": withheld,
            "configs": [
                {"name": c["config_name"], "splits": ", ".join(_split_names(c))}
                for c in counts["configs"]
            ],
            "example_config": example_config["config_name"],
            "example_split": _split_names(example_config)[0],
            "fingerprint": counts["fingerprint"],
            "tokenizer_sha256": manifest["files"]["tokenizer/tokenizer.json"]["sha256"],
            "license": license_title(license, license_name),
        },
    )
    _check_rendered(text, counts, splits)
    return text


def _metadata(counts: dict[str, Any], license: str, license_name: str | None) -> str:
    rows = sum(split["num_rows"] for split in counts["splits"].values())
    size = next((name for bound, name in _SIZES if rows < bound), "1M<n<10M")
    metadata = {
        "license": license,
        **({"license_name": license_name} if license_name else {}),
        "task_categories": ["text-generation"],
        "tags": ["doctab", "tokenized", "long-documents"],
        "size_categories": [size],
        "configs": counts["configs"],
    }
    return yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True).rstrip()


def _hub_source(manifest: dict[str, Any]) -> str | None:
    hub = manifest.get("hub")
    if hub is None:
        return None
    return ", ".join(f"{key} `{value}`" for key, value in hub.items() if isinstance(value, str))


def _split_names(config: dict[str, Any]) -> list[str]:
    return [entry["split"] for entry in config["data_files"]]


def _split_row(name: str, entry: dict[str, Any]) -> dict[str, str]:
    return {
        "split": name,
        "config": entry["config"],
        "rows": f"{entry['num_rows']:,}",
        "documents": f"{entry['num_documents']:,}",
        "chunks": f"{entry['num_chunks']:,}",
        "targets": f"{entry['num_targets']:,}",
        "target_sha256": entry["target_sha256"],
    }


def _shard_row(name: str, entry: dict[str, Any]) -> dict[str, str]:
    def total(key: str) -> str:
        return f"{sum(shard.get(key, 0) for shard in entry['shards']):,}"

    return {
        "split": name,
        "shards": f"{len(entry['shards']):,}",
        "read": total("read"),
        "empty": total("null_or_empty"),
        "bytes": total("too_few_bytes"),
        "tokens": total("too_few_tokens"),
        "kept": total("kept"),
    }


def _overlap_row(name: str, entry: dict[str, Any]) -> dict[str, str]:
    return {
        "split": name,
        "before": f"{entry['num_documents_before_overlaps']:,}",
        "found": f"{len(entry['overlaps']):,}",
        "done": "dropped" if entry["overlaps_dropped"] else "kept, and listed in the manifest",
        "after": f"{entry['num_documents']:,}",
    }


def _check_rendered(text: str, counts: dict[str, Any], splits: dict[str, Any]) -> None:
    """Read the finished card again: its header and its counts must be those of the files."""
    header = yaml.safe_load(text.split("---", 2)[1])
    if header["configs"] != counts["configs"]:
        raise ValueError("the card's configs must be those of counts.json; they are not.")
    seen = set()
    for rows in tables(text):
        for row in rows:
            entry = splits.get(row.get("split", ""))
            if entry is None:
                continue
            for column in ("rows", "documents", "chunks", "targets"):
                if column in row:
                    check_number(row[column], entry[f"num_{column}"], f"{column} of {row['split']}")
                    seen.add(row["split"])
    if seen != set(splits):
        raise ValueError(f"the card must show every split; it lacks {sorted(set(splits) - seen)}.")
