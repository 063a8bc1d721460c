"""The paper's data, from a list of shards of a Hub dataset (Sections 3.2 and 4.9).

A shard list is a JSON file in manifests/: the dataset, which shards make which split, the lengths,
the tokenizer's shards, and the counts that the paper reports. Another dataset in the same schema
needs only another list (`--manifest`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_scripts.assemble import BuildPlan, SplitPlan
from data_scripts.chunking import DocumentRules
from data_scripts.downloads import HubShard, find_shards

MANIFESTS = Path(__file__).parent / "manifests"
_KEYS = {"repo_id", "file", "chunk_length", "min_tokens", "tokenizer", "splits"}
_OPTIONAL_KEYS = {"expected", "notes"}
_SPLIT_KEYS = {"shards", "kind", "content", "confirmation", "overlaps", "max_chunks"}


@dataclass(frozen=True)
class ShardList:
    """A shard list as it was read.

    Attributes:
        path: of the file.
        content: its JSON.
    """

    path: Path
    content: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> ShardList:
        """Read and check a shard list.

        Raises:
            ValueError: if the file is missing, no JSON, or lacks or has an unknown key.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"--manifest must be a JSON file: {error}.") from None
        found = set(content) if isinstance(content, dict) else set()
        if not found >= _KEYS or found - _KEYS - _OPTIONAL_KEYS:
            raise ValueError(
                f"{path} must hold {', '.join(sorted(_KEYS))}, and may hold "
                f"{', '.join(sorted(_OPTIONAL_KEYS))}; found {', '.join(sorted(found)) or 'none'}."
            )
        for name, split in content["splits"].items():
            if unknown := set(split) - _SPLIT_KEYS:
                raise ValueError(
                    f"{path}: split {name} may hold {', '.join(sorted(_SPLIT_KEYS))}; "
                    f"found {', '.join(sorted(unknown))}."
                )
        return cls(path, content)

    def files(self, ranges: list[list[int]]) -> list[str]:
        """Paths in the dataset of inclusive ranges of shard numbers."""
        return [
            self.content["file"].format(number)
            for first, last in ranges
            for number in range(first, last + 1)
        ]

    def split_files(self) -> dict[str, list[str]]:
        """Every split's shards, in order."""
        splits = self.content["splits"].items()
        return {name: self.files(split["shards"]) for name, split in splits}


def hub_plan(
    shard_list: ShardList,
    folder: Path,
    *,
    source: str,
    revision: str | None = None,
    seed: int = 0,
    chunk_length: int | None = None,
    min_tokens: int | None = None,
    delete: bool = False,
    with_tokenizer: bool = True,
) -> tuple[BuildPlan, list[HubShard]]:
    """Resolve a shard list on the Hub, and plan the build.

    Args:
        shard_list: which shards.
        folder: where they are downloaded to.
        source: the source's name, for the manifest.
        revision: of the dataset; None is its main branch now.
        seed: of the training chunks' order.
        chunk_length, min_tokens: instead of the list's.
        delete: throw a shard away once its documents are staged.
        with_tokenizer: also find the tokenizer's shards.

    Returns:
        The plan, and the shards to train the tokenizer on (none without `with_tokenizer`).

    Raises:
        ValueError: if the dataset, revision or a shard is missing, or access is refused.
        ConnectionError: if the Hub cannot be reached.
    """
    content = shard_list.content
    files = shard_list.split_files()
    tokenizer_files = shard_list.files(content["tokenizer"]["shards"]) if with_tokenizer else []
    wanted = list(
        dict.fromkeys([*tokenizer_files, *(f for names in files.values() for f in names)])
    )
    commit, found = find_shards(content["repo_id"], wanted, folder, revision)
    by_file = {shard.file: replace(shard, delete=delete) for shard in found}
    splits = [
        SplitPlan(
            name,
            [by_file[file] for file in files[name]],
            **{key: value for key, value in split.items() if key != "shards"},
        )
        for name, split in content["splits"].items()
    ]
    rules = DocumentRules(
        chunk_length or content["chunk_length"],
        min_tokens or (chunk_length + 1 if chunk_length else content["min_tokens"]),
    )
    plan = BuildPlan(
        source,
        splits,
        rules,
        seed,
        notes=list(content.get("notes", [])),
        hub={"repo_id": content["repo_id"], "revision": commit},
        expected=content.get("expected"),
    )
    return plan, [by_file[file] for file in tokenizer_files]
