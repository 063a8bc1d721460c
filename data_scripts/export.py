"""A chunk set as Parquet, ready to be pushed: `python -m data_scripts.export DIR --out FOLDER`.

    FOLDER/counts.json              counts, hashes and the Hub's `configs`
    FOLDER/README.md                only the `configs` block, until a card is written over it
    FOLDER/manifest.json            the chunk set's own
    FOLDER/tokenizer/
    FOLDER/chunks/train-00000-of-00004.parquet
    FOLDER/documents/dev_val-00000-of-00001.parquet

`load_dataset(FOLDER, "chunks")` and `load_dataset(FOLDER, "documents")` read the same arrays as
the memory map. Splits marked as confirmation stay out unless `--include_confirmation` is given;
then they are a configuration of their own.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from tqdm import tqdm

from data_scripts.builder import set_features, split_sizes, split_table
from data_scripts.chunk_set import ChunkSet, file_sha256
from data_scripts.command_line import normalise_flags, run
from data_scripts.staging import fresh_folder, publish, staging_folder, write_json

_ROWS_PER_GROUP = 256


def main(argv: Sequence[str] | None = None) -> None:
    """Export one set.

    Raises:
        ValueError: if the folder is no chunk set, or the output is taken.
    """
    parser = argparse.ArgumentParser(
        prog="python -m data_scripts.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("chunk_set", type=Path, metavar="DIR", help="the chunk set")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder to make")
    parser.add_argument(
        "--rows_per_file", type=int, default=16_384, help="chunks or documents (%(default)s)"
    )
    parser.add_argument(
        "--include_confirmation",
        action="store_true",
        help="also write splits that may be scored only once; whoever reads them can look",
    )
    arguments = parser.parse_args(normalise_flags(sys.argv[1:] if argv is None else argv))
    counts = export_parquet(
        ChunkSet.open(arguments.chunk_set, verify=True),
        arguments.out,
        arguments.rows_per_file,
        arguments.include_confirmation,
    )
    for name, entry in counts["splits"].items():
        print(f"{name:<14} {entry['num_rows']:>9,} rows in {len(entry['files'])} files")


def export_parquet(
    chunk_set: ChunkSet, out: Path, rows_per_file: int = 16_384, include_confirmation: bool = False
) -> dict[str, Any]:
    """Write the Parquet folder; returns what counts.json holds.

    Args:
        chunk_set: what to export.
        out: the folder to make; it must not exist, or be empty.
        rows_per_file: chunks or documents in a file.
        include_confirmation: also write the splits marked as confirmation.

    Raises:
        ValueError: if `out` is taken, or a split's name is none that `datasets` takes.
    """
    if rows_per_file < 1:
        raise ValueError(f"rows_per_file must be at least 1; found {rows_per_file}.")
    configs = {"chunks": split_sizes(chunk_set, "chunks")}
    sizes = split_sizes(chunk_set, "documents", confirmation=include_confirmation)
    for split, size in sizes.items():
        config = "confirmation" if chunk_set.is_confirmation(split) else "documents"
        configs.setdefault(config, {})[split] = size
    with staging_folder(out) as staging:
        prepared = fresh_folder(staging / "export")
        splits = {
            split: _write_split(chunk_set, prepared, config, split, size, rows_per_file)
            for config, config_sizes in configs.items()
            for split, size in config_sizes.items()
        }
        counts = {
            "fingerprint": chunk_set.fingerprint,
            "chunk_length": chunk_set.chunk_length,
            "vocab_size": chunk_set.vocab_size,
            "bos_token_id": chunk_set.bos_token_id,
            "splits": splits,
            "configs": [_config_entry(name, list(sizes)) for name, sizes in configs.items()],
        }
        write_json(prepared / "counts.json", counts, indent=1)
        front_matter = yaml.safe_dump({"configs": counts["configs"]}, sort_keys=False)
        (prepared / "README.md").write_text(f"---\n{front_matter}---\n", encoding="utf-8")
        shutil.copytree(chunk_set.tokenizer_path, prepared / "tokenizer")
        shutil.copy(chunk_set.path / "manifest.json", prepared / "manifest.json")
        publish(prepared, out)
    return counts


def _write_split(
    chunk_set: ChunkSet, folder: Path, config: str, split: str, size: int, rows_per_file: int
) -> dict[str, Any]:
    """The split's files; returns its entry in counts.json."""
    (folder / config).mkdir(exist_ok=True)
    kind = "chunks" if config == "chunks" else "documents"
    schema = set_features(chunk_set, kind).arrow_schema
    num_files = -(-size // rows_per_file)
    files = {}
    for number in tqdm(range(num_files), desc=f"export {split}", unit="file"):
        name = f"{config}/{split}-{number:05d}-of-{num_files:05d}.parquet"
        stop = min((number + 1) * rows_per_file, size)
        with pq.ParquetWriter(folder / name, schema, compression="zstd") as writer:
            for start in range(number * rows_per_file, stop, _ROWS_PER_GROUP):
                end = min(start + _ROWS_PER_GROUP, stop)
                writer.write_table(split_table(chunk_set, split, kind, start, end))
        files[name] = {
            "num_rows": stop - number * rows_per_file,
            "num_bytes": (folder / name).stat().st_size,
            "sha256": file_sha256(folder / name),
        }
    entry = chunk_set.manifest["splits"][split]
    counted = ("num_documents", "num_chunks", "num_targets")
    return {
        "config": config,
        "confirmation": entry["confirmation"],
        "num_rows": size,
        **{name: entry[name] for name in counted},
        "target_sha256": chunk_set.target_sha256(split),
        "files": files,
    }


def _config_entry(name: str, splits: list[str]) -> dict[str, Any]:
    """One configuration of the Hub's `configs` block."""
    data_files = [{"split": split, "path": f"{name}/{split}-*.parquet"} for split in splits]
    entry: dict[str, Any] = {"config_name": name, "data_files": data_files}
    return entry | ({"default": True} if name == "chunks" else {})


if __name__ == "__main__":
    sys.exit(run(main))
