"""The whole line as one command: chunk set, runs, scores, tables, cards.

    python -m training.line demo

Each phase is a command that can be run alone, in a process of its own; the line prints it. What is
there and belongs to the current inputs is reused, and the line says so. A phase that was
interrupted starts anew.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from data_scripts.chunk_set import ChunkSet
from training.config import load_recipe

RECIPES = Path("training/recipes")  # the commands run in the checkout
DEMO_ARMS = ("b", "b_table", "lg", "lg_table")

# Runs where neither the project nor its folder can be imported: what a stranger has who downloads
# the model.
LOAD_AND_GENERATE = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
logging.set_verbosity_error(); logging.disable_progress_bar()
folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
assert "modeling_doctab" not in sys.modules and "training" not in sys.modules
ids = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
out = model.generate(torch.tensor([ids]), max_new_tokens=48, do_sample=False)
print(prompt + "\\033[1m" + tokenizer.decode(out[0, len(ids):]) + "\\033[0m")
"""
PROMPT = """def test_empty(self):
        self.assertEqual(len(self.make()), 0)
        self.assertRaises(IndexError, self.make().pop)

    def test_one(self):
        self.assertEqual("""


@dataclass
class Phase:
    """Prints what a phase does and how long it took."""

    title: str

    def __enter__(self) -> "Phase":
        print(f"\n\033[1m{self.title}\033[0m", flush=True)
        self.start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            print(f"  {time.perf_counter() - self.start:.0f} s", flush=True)


def run(*command: str | Path, cwd: Path | None = None, shown: str | None = None) -> None:
    """Run one command of the line and show it, or `shown` in its place.

    Raises:
        SystemExit: with the command's exit code, if it fails.
    """
    words = [str(word) for word in command]
    print("  $ " + (shown or shlex.join(["python", *words])), flush=True)
    code = subprocess.run([sys.executable, *words], cwd=cwd, check=False).returncode
    if code:
        sys.exit(code)


def launch(recipe: Path, *arguments: str) -> None:
    """Train one recipe under `accelerate launch` with the shipped configuration."""
    run(
        *("-m", "accelerate.commands.launch", "--config_file", "accelerate_config.yaml"),
        *("-m", "training.train", recipe, *arguments),
    )


def is_finished(recipe_path: Path, fingerprint: str) -> bool:
    """Whether the recipe's run is done, with this recipe and this chunk set."""
    recipe = load_recipe(recipe_path)
    try:
        status = json.loads((recipe.run_dir / "status.json").read_text())
        results = json.loads((recipe.run_dir / "results.json").read_text())
    except (OSError, ValueError):
        return False
    found = (status["state"], results["recipe_sha256"], results["data_sha256"])
    return found == ("done", recipe.sha256(), fingerprint)


def demo() -> None:
    """Four small arms on Python's own source, from text to a model card."""
    began = time.perf_counter()
    folder = Path("demo")
    chunk_set = folder / "chunk_set"
    runs = [folder / "runs" / arm for arm in DEMO_ARMS]

    with Phase("Chunk set: long documents from Python's own installed source"):
        try:
            ChunkSet.open(chunk_set, verify=True)
            print(f"  reusing {chunk_set}")
        except ValueError:
            run("-m", "data_scripts.build", "stdlib", "--out", chunk_set)
    fingerprint = ChunkSet.open(chunk_set).fingerprint

    for arm in DEMO_ARMS:
        recipe = RECIPES / "demo" / f"{arm}.yaml"
        with Phase(f"Train {arm}: {load_recipe(recipe).description}"):
            if is_finished(recipe, fingerprint):
                print(f"  reusing {load_recipe(recipe).run_dir}")
            else:
                launch(recipe, "--overwrite")

    with Phase("Score held-out documents in the training format"):
        run(
            *("-m", "evaluation.score", *runs, "--chunk_set", chunk_set),
            *("--sets", "dev_val", "--format", "training"),
        )
    with Phase("Model card, filled from the run's files"):
        run("-m", "evaluation.report", *runs, "--out", folder / "report", "--quiet")
        for arm, baseline in (("b_table", "b"), ("lg_table", "lg")):
            run(
                *("-m", "hub_cards.cards", folder / "runs" / arm),
                *("--baseline", folder / "runs" / baseline),
            )
    with Phase("Load final/ where the project cannot be imported, and generate"):
        final = (folder / "runs" / "lg_table" / "final").resolve()
        with tempfile.TemporaryDirectory() as elsewhere:
            run(
                *("-I", "-c", LOAD_AND_GENERATE, final, PROMPT),
                cwd=Path(elsewhere),
                shown="python -I -c '... AutoModelForCausalLM.from_pretrained(\"final\") ...'",
            )

    with Phase("Result"):
        run("-m", "evaluation.report", *runs, "--out", folder / "report", "--summary")
    print(
        f"figure  {folder / 'report'}\ncard    {folder / 'runs' / 'lg_table' / 'final'}/README.md"
    )
    print(f"the whole demo took {time.perf_counter() - began:.0f} s")


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("line", choices=["demo"], help="which line to run")
    parser.parse_args()
    demo()
    return 0


if __name__ == "__main__":
    sys.exit(main())
