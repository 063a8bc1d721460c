"""What a command line imports before it knows what is asked of it."""

import subprocess
import sys

HEAVY = ("transformers", "accelerate", "numba", "pyarrow")


def test_the_trainers_help_imports_nothing_heavy():
    code = (
        "import sys, training.train as t\n"
        "try:\n    t.main(['--help'])\n"
        f"except SystemExit:\n    print([m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--num_updates" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
