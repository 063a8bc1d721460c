"""Where documents come from: Parquet shards, text files, Python's own source.

A source is a list of shards. A shard is read in one go by one process, always in the same order,
and yields (document id, UTF-8 bytes).
"""

from __future__ import annotations

import glob
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from data_scripts.chunk_set import file_sha256

_FILES_PER_SHARD = 32
# Generated tables (one file a code page) say nothing about code.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings"}


@dataclass(frozen=True)
class ParquetShard:
    """One Parquet file with a string column `text`, a document a row (the ClimbMix schema)."""

    path: Path
    column: str = "text"

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return self.path.name

    def check(self) -> None:
        """Look at the schema alone.

        Raises:
            ValueError: if the file is not Parquet or lacks the text column.
        """
        try:
            schema = pq.read_schema(self.path)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{self.path} must be a Parquet file: {error}") from None
        types = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        names = ", ".join(f"{field.name} ({field.type})" for field in schema)
        if self.column not in schema.names or not any(
            is_type(schema.field(self.column).type) for is_type in types
        ):
            raise ValueError(
                f"{self.path} must have a string column {self.column!r}; found {names or 'none'}. "
                "Rename your column, or write the text into one of that name."
            )

    def documents(self) -> Iterator[tuple[str, bytes | None]]:
        """(`file.parquet:row`, text bytes), with None for a null.

        Raises:
            ValueError: if the file is damaged.
        """
        row = 0
        try:
            with pq.ParquetFile(self.path) as file:
                for batch in file.iter_batches(batch_size=256, columns=[self.column]):
                    for text in batch.column(0).cast(pa.large_binary()):
                        yield f"{self.name}:{row}", text.as_py()
                        row += 1
        except (pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None):  # the disk's trouble, not the file's
                raise
            raise ValueError(
                f"{self.path} must be a whole Parquet file; it cannot be read after row {row}: "
                f"{error}. Write or download it again."
            ) from None

    def sha256(self) -> str:
        """Hash of the file."""
        return file_sha256(self.path)

    def release(self) -> None:
        """Its documents have been read: a file of the user's stays."""


@dataclass(frozen=True)
class FileShard:
    """Some files, each a document, named by their path below `root`."""

    name: str
    root: Path
    files: tuple[str, ...]

    def check(self) -> None:
        """Files are read as they are; what is not UTF-8 is reported when it is read."""

    def documents(self) -> Iterator[tuple[str, bytes | None]]:
        """(path below the root, the file's bytes)."""
        for file in self.files:
            yield file, (self.root / file).read_bytes()

    def sha256(self) -> str:
        """Hash of the names and contents, in order."""
        digest = hashlib.sha256()
        for file, raw in self.documents():
            digest.update(f"{file}\0{hashlib.sha256(raw or b'').hexdigest()}\n".encode())
        return digest.hexdigest()

    def release(self) -> None:
        """Its documents have been read: files of the user's stay."""


class TextShard(Protocol):
    """What a build reads: a local file, some local files, or a file of the Hub."""

    @property
    def name(self) -> str:
        """For the manifest, the same on every machine."""

    def check(self) -> None:
        """Raise a ValueError for what can be seen to be wrong before anything is read."""

    def documents(self) -> Iterator[tuple[str, bytes | None]]:
        """(document id, UTF-8 bytes), always in the same order."""

    def sha256(self) -> str:
        """Hash of the content."""

    def release(self) -> None:
        """Its documents have been read and staged."""


def parquet_shards(pattern: str) -> list[TextShard]:
    """The Parquet files that a glob pattern names, sorted by path.

    Raises:
        ValueError: if it names none, or one lacks the text column.
    """
    shards = [ParquetShard(path) for path in _matching_files(pattern)]
    for shard in shards:
        shard.check()
    return list(shards)


def text_shards(pattern: str) -> list[TextShard]:
    """The text files that a glob pattern names, each a document, sorted by path.

    Raises:
        ValueError: if it names none.
    """
    files = _matching_files(pattern)
    root = files[0].parent
    while not all(file.is_relative_to(root) for file in files):
        root = root.parent
    return _file_shards("text", root, [str(file.relative_to(root)) for file in files])


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def installed_packages() -> Path:
    """The folder of the running Python's installed packages."""
    return Path(sysconfig.get_paths()["purelib"])


def python_files(root: Path, min_bytes: int) -> list[str]:
    """Python files below `root` that are UTF-8 and hold at least `min_bytes`, in a fixed shuffle.

    The shuffle sorts by a hash of the path, so that the packages are spread over all splits and
    a file keeps its place from one Python to the next.
    """
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS & set(relative.parts) or path.stat().st_size < min_bytes:
            continue
        try:
            path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # the library's own tests of broken encodings
            continue
        found.append(relative.as_posix())
    return sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())


def python_shards(root: Path, files: list[str], name: str) -> list[TextShard]:
    """Python files below `root` as shards, in the given order."""
    return _file_shards(name, root, files)


def _file_shards(name: str, root: Path, files: list[str]) -> list[TextShard]:
    starts = range(0, len(files), _FILES_PER_SHARD)
    return [
        FileShard(f"{name}-{i:05d}", root, tuple(files[start : start + _FILES_PER_SHARD]))
        for i, start in enumerate(starts)
    ]


def _matching_files(pattern: str) -> list[Path]:
    files = sorted(Path(name) for name in glob.glob(pattern, recursive=True))  # noqa: PTH207
    files = [file for file in files if file.is_file()]
    if not files:
        raise ValueError(f"a split's pattern must name at least one file; {pattern!r} names none.")
    return files
