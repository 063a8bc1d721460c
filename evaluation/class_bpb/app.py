"""A page for the metric: paste columns as JSON, read the result.

`evaluate.utils.launch_gradio_widget` does not run on current gradio, so the page is written out.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
# `python app.py` puts this folder first on the path, where statistics.py would hide the standard
# library's module of that name.
sys.path = [entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER]

EXAMPLE = {
    "nats": [2.31, 0.07, 4.02, 1.25],
    "num_bytes": [3, 4, 1, 2],
    "target_order": [0, 4, 1, 2],
    "target_distance": [0, 37, 512, 4000],
    "visible": [False, True, True, False],
    "table_order": [0, 4, 2, 2],
    "table_right": [False, True, False, True],
    "document": [0, 0, 1, 1],
    "baseline_nats": [2.35, 0.61, 4.01, 2.5],
}


def score_json(text: str) -> dict[str, Any]:
    """Compute the metric from a JSON object of columns and, optionally, `compute`'s arguments.

    Returns:
        The metric's result without its empty classes, or `error` with the reason.
    """
    import evaluate

    try:
        columns = json.loads(text)
        result = evaluate.load(str(FOLDER)).compute(**columns)
    except (ValueError, TypeError) as error:
        return {"error": str(error)}
    filled = {name: row for name, row in result["classes"].items() if row["share"] > 0}
    result["classes"] = filled
    if "gain_by_class" in result:
        result["gain_by_class"] = {name: result["gain_by_class"][name] for name in filled}
        if any(math.isnan(end) for end in result["gain_interval"]):
            result["gain_interval"] = None
    return dict(result)


def build_page() -> Any:
    """The gradio page."""
    import gradio

    with gradio.Blocks(title="class_bpb") as page:
        gradio.Markdown((FOLDER / "README.md").read_text().split("---", 2)[2])
        columns = gradio.Textbox(json.dumps(EXAMPLE), label="columns (JSON)", lines=12)
        result = gradio.JSON(label="result")
        gradio.Button("Compute").click(score_json, inputs=columns, outputs=result)
    return page


if __name__ == "__main__":
    build_page().launch()
