from __future__ import annotations

import json
import re

import numpy as np
import pytest

from data_scripts.describe import main as describe
from modeling_doctab import naive
from tests.data_scripts.test_target_classes import plain_target_orders


def shares(output: str, split: str) -> dict[str, list[float]]:
    """The percentages of a split's section, by the name at the line's beginning."""
    section = output.partition(f"\n{split}: ")[2].partition("\n\n")[0]
    found = {}
    for line in section.splitlines():
        name, *_ = re.split(r"\s{2,}", line.strip())
        found[name] = [float(value) for value in re.findall(r"([\d.]+)%", line)]
    return found


def test_counts_and_lines(chunk_set, capsys):
    describe([str(chunk_set.path)])
    output = capsys.readouterr().out
    counts = chunk_set.manifest["splits"]["train"]
    assert f"{counts['num_documents']} documents" in output
    assert "1 overlaps dropped of 6 documents" in output
    assert "around a chunk boundary" in output
    found = shares(output, "dev")
    assert found["copies"][1] == 31.9  # the paper's line, beside ours


def test_the_shares_are_those_of_plain_loops(chunk_set, capsys):
    describe([str(chunk_set.path), "--row-length", "16"])
    found = shares(capsys.readouterr().out, "dev")
    bos, length = chunk_set.bos_token_id, chunk_set.chunk_length
    documents = chunk_set.documents("dev")
    cells = []
    for i in range(len(documents)):
        tokens = documents.document(i).tolist()
        # The plain loops put 99 where BOS stands, so the two ids change places.
        classes = plain_target_orders([bos if t == 99 else t for t in tokens])
        for start in range(0, len(tokens) - length + 1, length):
            chunk = tokens[start : start + length]
            fields = naive.lookup([bos, *chunk[:-1]])
            for offset, (target, (order, candidate, _)) in enumerate(
                zip(chunk, fields, strict=True)
            ):
                n, distance = classes[start + offset]
                is_visible = n > 0 and offset - distance >= offset // 16 * 16
                state = "no match" if order == 0 else "right" if candidate == target else "wrong"
                cells.append((min(n, 2), distance, is_visible, state))
    total = len(cells)
    names = ["order 0", "order 1", "copies"]
    for kind, name in enumerate(names):
        chosen = [cell for cell in cells if cell[0] == kind]
        assert found[name][0] == pytest.approx(100 * len(chosen) / total, abs=0.051)
        for state in ("no match", "right", "wrong"):
            share = 100 * sum(cell[3] == state for cell in chosen) / total
            assert found[f"{name}, table {state}"][0] == pytest.approx(share, abs=0.051)
    copies = [cell for cell in cells if cell[0] == 2]
    visible = 100 * np.mean([cell[2] for cell in copies])
    assert found["copies"][2] == pytest.approx(visible, abs=0.051)
    for low, high, name in [(0, 4, "0 - 4"), (16, 32, "16 - 32"), (64, 10**9, "beyond 64")]:
        share = 100 * sum(low < cell[1] <= high for cell in copies) / total
        assert found[name][0] == pytest.approx(share, abs=0.051)


def test_the_nine_table_cells_are_all(chunk_set, capsys):
    describe([str(chunk_set.path)])
    found = shares(capsys.readouterr().out, "train")
    nine = [found["no match"][0]]
    for n in range(1, 5):
        nine += found[f"order {n}"][:2]
    assert sum(nine) == pytest.approx(100, abs=0.5)
    assert min(nine) > 0


@pytest.fixture
def registration(chunk_set, tmp_path):
    path = tmp_path / "registration.json"
    content = {"set_name": "confirmation", "data_sha256": chunk_set.fingerprint}
    path.write_text(json.dumps(content))
    return path


def test_a_confirmation_split_is_opened_only_with_its_registration(chunk_set, registration, capsys):
    describe([str(chunk_set.path)])
    closed = capsys.readouterr().out
    assert "confirmation: marked as confirmation, not opened without its --registration" in closed
    assert shares(closed, "confirmation").get("copies") is None
    describe([str(chunk_set.path), "--registration", str(registration)])
    assert shares(capsys.readouterr().out, "confirmation")["copies"]


def test_other_registrations_are_refused(chunk_set, registration, tmp_path):
    arguments = [str(chunk_set.path), "--registration", str(registration)]
    content = json.loads(registration.read_text())
    registration.write_text(json.dumps(content | {"data_sha256": "0" * 64}))
    with pytest.raises(ValueError, match="must name this set's data_sha256"):
        describe(arguments)
    registration.write_text(json.dumps(content | {"set_name": "other"}))
    with pytest.raises(ValueError, match=r"it names 'other'\. There are dev, confirmation"):
        describe(arguments)
    registration.write_text(json.dumps({"set_name": "confirmation"}))
    with pytest.raises(ValueError, match="must be a JSON file with data_sha256 and set_name"):
        describe(arguments)
    registration.unlink()
    with pytest.raises(ValueError, match="must be a JSON file with data_sha256 and set_name"):
        describe(arguments)


def test_bad_numbers(chunk_set):
    with pytest.raises(ValueError, match="--max_chunks must be at least 1; found 0"):
        describe([str(chunk_set.path), "--max-chunks", "0"])
    with pytest.raises(ValueError, match="row_length must divide chunk_length; found 7 and 64"):
        describe([str(chunk_set.path), "--row_length", "7"])
