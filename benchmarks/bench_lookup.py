"""The loader's lookup against four Python dictionaries, one an order, on the same rows.

Rows are Python's own standard library under the demo's tokenizer settings, V 8,192: real text, and
there on every machine.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness import Result, compare
from data_scripts.lookup import MAX_ORDER, lookup_rows
from data_scripts.rows import segments_at_bos
from modeling_doctab import lookup_document_table

ROWS, LENGTH, ORDERS = 16, 8192, 4


Fields = list[tuple[int, int, int]]  # (order, candidate, distance) of each position


def dictionaries(
    rows: list[list[int]], max_order: int = ORDERS, bos_token_id: int | None = None
) -> list[Fields]:
    """One dictionary an order, from a tuple of ids to the last position that it ended at.

    With `bos_token_id` each BOS opens a document of its own: the dictionaries are emptied.
    """
    found: list[Fields] = []
    for row in rows:
        last: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_order + 1)]
        fields: Fields = []
        start = 0
        for t in range(len(row)):
            if row[t] == bos_token_id:
                start = t
                last = [{} for _ in range(max_order + 1)]
            best = (0, -1, 0)
            for n in range(min(max_order, t - start + 1), 0, -1):
                s = last[n].get(tuple(row[t - n + 1 : t + 1]))
                if s is not None:
                    best = (n, row[s + 1], t - s)
                    break
            fields.append(best)
            for n in range(1, min(max_order, t - start + 1) + 1):
                last[n][tuple(row[t - n + 1 : t + 1])] = t
        found.append(fields)
    return found


def general_rows(rows: np.ndarray) -> tuple[np.ndarray, int]:
    """The same text with ids of a vocabulary of 131,072, cut into documents of about 600 tokens.

    Returns:
        [rows, length] ids, and the id of BOS.
    """
    spread = rows * 15 + 7  # beyond 16 bits, as a large vocabulary's are
    bos_token_id = 131_071
    spread[:, 0] = bos_token_id
    is_start = np.random.default_rng(0).random(rows.shape) < 1 / 600
    spread[is_start] = bos_token_id
    return spread, bos_token_id


@lru_cache(maxsize=1)
def real_rows(vocab_size: int = 8192) -> np.ndarray:
    """[ROWS, LENGTH] tokens of the standard library's longest files, BOS in slot 0."""
    import sysconfig

    import rustbpe

    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(stdlib.glob("*.py"), key=lambda p: (-p.stat().st_size, p.name))
    texts = [f.read_text(encoding="utf-8", errors="replace") for f in files]
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(iter(texts), vocab_size - 4)
    tokens: list[int] = []
    for text in texts:
        tokens += tokenizer.encode(text)
        if len(tokens) > ROWS * LENGTH:
            break
    rows = np.array(tokens[: ROWS * LENGTH]).reshape(ROWS, LENGTH)
    rows[:, 0] = vocab_size - 4
    return rows


def run() -> Iterator[Result]:
    """The loader's case, then the general one, on one thread."""
    torch.set_num_threads(1)
    yield from _loaders_case()
    yield from _general_case()


def _loaders_case() -> Iterator[Result]:
    """V 8,192, whole rows, orders to 4; and the tensor lookup beside it."""
    rows = real_rows()
    as_lists = rows.tolist()
    tensor = torch.from_numpy(rows)

    def check(outputs: dict) -> None:
        expected = outputs["four dictionaries"]
        for name in ("numba", "tensors"):
            triples = np.stack([np.asarray(field) for field in outputs[name]], -1)
            assert triples.tolist() == [[list(x) for x in row] for row in expected], name
        if "rosa-torch" in outputs:
            # Its longest match has no bound: the same token wherever ours is shorter than ours may
            # be, and a match at the same positions.
            order, candidate, _ = (np.asarray(field) for field in outputs["numba"])
            predicted = outputs["rosa-torch"].numpy()
            short = order < ORDERS
            assert np.array_equal(predicted[short], candidate[short])
            assert np.array_equal(predicted < 0, order == 0)

    yield compare(
        "lookup",
        question=f"the lookup of {ROWS} rows of {LENGTH:,} real tokens, orders 1 to {ORDERS}, "
        "against one Python dictionary an order",
        prediction="50x dictionaries or more on one core; tensors about as fast as dictionaries; "
        "60x rosa-torch, which took 181 ms elsewhere",
        cases={
            "numba": lambda: lookup_rows(rows, ORDERS),
            "tensors": lambda: lookup_document_table(tensor, ORDERS),
            "four dictionaries": lambda: dictionaries(as_lists),
            **_rosa(tensor),
        },
        check=check,
        target={"four dictionaries": 50.0, "rosa-torch": 10.0},
        facts={"rows": ROWS, "length": LENGTH, "vocab_size": 8192},
    )


def _rosa(rows: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """rosa-torch's exact suffix automaton, by its numba backend, where it is installed."""
    try:
        import rosa
    except ImportError:
        print("left out: rosa-torch (pip install -r requirements-bench.txt)", flush=True)
        return {}

    def prefill() -> torch.Tensor:
        with rosa.init_inference_state(*rows.shape) as state:
            return rosa.prefill(state, rows)

    return {"rosa-torch": prefill}


def _general_case() -> Iterator[Result]:
    """Ids over 16 bits, documents split at BOS, orders to 8."""
    rows, bos_token_id = general_rows(real_rows())
    segments = segments_at_bos(rows, bos_token_id)
    as_lists = rows.tolist()

    def check(outputs: dict) -> None:
        triples = np.stack([np.asarray(field) for field in outputs["numba"]], -1)
        assert triples.tolist() == [[list(x) for x in row] for row in outputs["eight dictionaries"]]

    yield compare(
        "lookup_general",
        question=f"the lookup of {ROWS} rows of {LENGTH:,} real tokens, V 131,072, documents split "
        f"at BOS, orders 1 to {MAX_ORDER}, against one Python dictionary an order",
        prediction="12x or more on one core",
        cases={
            "numba": lambda: lookup_rows(rows, MAX_ORDER, segments),
            "eight dictionaries": lambda: dictionaries(as_lists, MAX_ORDER, bos_token_id),
            "four dictionaries": lambda: dictionaries(as_lists, ORDERS, bos_token_id),
        },
        check=check,
        target=12.0,
        rounds=5,
        facts={"rows": ROWS, "length": LENGTH, "vocab_size": bos_token_id + 1},
    )
