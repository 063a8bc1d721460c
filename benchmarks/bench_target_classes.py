"""Order and distance of every target over its whole document, against Python dictionaries."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import cycle

import numpy as np

from benchmarks.harness import Result, compare
from data_scripts.target_classes import target_orders

NUM_TARGETS = 10_000_000
VOCAB_SIZE = 8192
BOS = VOCAB_SIZE - 4
LENGTHS = (300_000, 100_000, 30_000, 9_000)  # of documents, in turn


@lru_cache(maxsize=1)
def standard_library_tokens(vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    """All tokens of Python's own source, tests included where they are installed."""
    import sysconfig
    from pathlib import Path

    import rustbpe

    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(root.rglob("*.py")) if "site-packages" not in file.parts]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(iter(texts[:200]), vocab_size - 4)
    return np.array([token for text in texts for token in tokenizer.encode(text)], np.int64)


def documents(num_targets: int = NUM_TARGETS) -> list[np.ndarray]:
    """Documents of `LENGTHS` tokens in turn; the text starts over when it is used up."""
    tokens = standard_library_tokens()
    found = []
    position = total = 0
    for length in cycle(LENGTHS):
        length = min(length, num_targets - total, len(tokens))
        if position + length > len(tokens):
            position = 0
        found.append(tokens[position : position + length])
        position += length
        total += length
        if total == num_targets:
            return found
    raise AssertionError("cycle is endless")


def by_dictionaries(tokens: list[int], max_order: int = 4) -> list[tuple[int, int]]:
    """Order and distance of each target: one dictionary an order, from gram to last position."""
    last: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_order)]
    stream = [BOS, *tokens]
    found = []
    for t in range(1, len(stream)):
        best = (0, 0)
        grams = [tuple(stream[t - n : t + 1]) for n in range(1, min(max_order, t) + 1)]
        for n in range(len(grams), 0, -1):
            s = last[n - 1].get(grams[n - 1])
            if s is not None:
                best = (n, t - s)
                break
        found.append(best)
        for table, gram in zip(last, grams, strict=False):
            table[gram] = t
    return found


def run(num_targets: int = NUM_TARGETS) -> Iterator[Result]:
    """One case: ours on one core, the dictionaries on the same lists."""
    arrays = documents(num_targets)
    lists = [tokens.tolist() for tokens in arrays]

    def check(outputs: dict) -> None:
        for ours, theirs in zip(outputs["numba"], outputs["dictionaries"], strict=True):
            np.testing.assert_array_equal(np.stack(ours, axis=1), np.array(theirs))

    yield compare(
        "target_classes",
        question=f"order and distance of {num_targets:,} targets in documents of up to "
        f"{max(map(len, arrays)):,} tokens, against one Python dictionary an order",
        prediction="30x on one core: the loader's lookup has 25 to 39 with short rows",
        cases={
            "numba": lambda: [target_orders(tokens, BOS) for tokens in arrays],
            "dictionaries": lambda: [by_dictionaries(tokens) for tokens in lists],
        },
        check=check,
        target=20.0,
        rounds=2,  # the dictionaries take about half a minute
        facts={"num_targets": num_targets, "num_documents": len(arrays)},
    )
