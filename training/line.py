"""The whole line as one command: chunk set, runs, scores, tables, cards.

    python -m training.line demo

Each phase is a command that can be run alone, in a process of its own; the line prints it. What is
there and belongs to the current inputs is reused, and the line says so. A phase that was
interrupted starts anew.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from training.config import load_recipe
from training.phases import (
    LAUNCHER,
    Phase,
    forward_sigterm,
    is_finished,
    prepare_chunk_set,
    run,
)

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


def launch(recipe: Path, *arguments: str) -> None:
    """Train one recipe under `accelerate launch` with the shipped configuration."""
    run(*LAUNCHER, "-m", "training.train", recipe, *arguments)


def demo() -> None:
    """Four small arms on Python's own source, from text to a model card."""
    began = time.perf_counter()
    folder = Path("demo")
    chunk_set = folder / "chunk_set"
    runs = [folder / "runs" / arm for arm in DEMO_ARMS]

    with Phase("Chunk set: long documents from Python's own installed source"):
        fingerprint = prepare_chunk_set(chunk_set, "stdlib")

    for arm in DEMO_ARMS:
        path = RECIPES / "demo" / f"{arm}.yaml"
        recipe = load_recipe(path)
        with Phase(f"Train {arm}: {recipe.description}"):
            if is_finished(recipe, fingerprint):
                print(f"  reusing {recipe.run_dir}")
            else:
                launch(path, "--overwrite")

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
    forward_sigterm()
    demo()
    return 0


if __name__ == "__main__":
    sys.exit(main())
