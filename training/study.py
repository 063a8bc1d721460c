"""A whole study as one command: data, every run, scores, registration, confirmation, report.

    python -m training.study training/studies/documents.yaml --corpus DIR --out DIR

A study is one YAML file: what data is built, which arms are trained with which seeds, what is
scored. Each step is a command that can be run alone; the study prints it. The same command goes on
after a cut: runs continue from their last checkpoint, finished work is reused.

`--until scores` stops with a report on the development sets: write predictions into the study's
registration draft, then go on. Nothing is scored on a confirmation set before that registration.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from data_scripts import command_line
from data_scripts.chunk_set import ChunkSet
from training.config import Recipe, load_recipe
from training.evidence import copy_evidence
from training.phases import LAUNCHER, Phase, forward_sigterm, is_finished, run, start
from training.study_drafts import Draft, arms_of
from training.study_plan import Group, StudyPlan, read_study

STEPS = ("data", "runs", "scores", "registration", "confirmation")
_STOPPED = 75
_STRIDES = ("--format", "stride", "--reach")


@dataclass(frozen=True)
class Arm:
    """One run of the study."""

    recipe_path: Path
    recipe: Recipe
    data: str

    @property
    def name(self) -> str:
        """ARM_sSEED, the run folder's name."""
        return self.recipe.run_dir.name

    @property
    def is_done(self) -> bool:
        """Whether its chunk set is there and its run is finished."""
        folder = Path(str(self.recipe.data.chunk_set))
        if not (folder / "manifest.json").is_file():
            return False
        return is_finished(self.recipe, ChunkSet.open(folder).fingerprint)

    def has_scores(self, set_name: str) -> bool:
        """Whether it was scored on a set in the training format."""
        return (self.recipe.run_dir / "scores" / f"{set_name}.training.npz").is_file()

    @property
    def command(self) -> list[str]:
        """`training.train` with the overrides that place the run in the study."""
        return [
            *("training.train", str(self.recipe_path), "--seed", str(self.recipe.seed)),
            *("--chunk_set", str(self.recipe.data.chunk_set)),
            *("--output_dir", str(self.recipe.output_dir), "--resume", "auto"),
        ]


class Study:
    """A plan in a folder, step by step.

    Args:
        plan: from `read_study`.
        out: the study's folder.
        corpus: folder of the documents, where the plan's data commands name one.
        groups: names of the groups to run; all by default.
        jobs: runs trained side by side, each with its share of the CPU's threads.
    """

    def __init__(
        self,
        plan: StudyPlan,
        out: Path,
        corpus: Path | None = None,
        groups: Sequence[str] = (),
        jobs: int = 1,
    ) -> None:
        if jobs < 1:
            raise ValueError(f"--jobs must be at least 1; got {jobs}.")
        self.plan, self.out, self.jobs = plan, out, jobs
        unknown = sorted(set(groups) - set(plan.groups))
        if unknown:
            raise ValueError(
                f"--groups must name groups of the study ({', '.join(plan.groups)}); "
                f"{unknown[0]!r} is none."
            )
        self.groups = {
            name: group for name, group in plan.groups.items() if not groups or name in groups
        }
        self._drafts = [
            Draft(path, out, number)
            for number, path in enumerate(plan.registration, 1)
            if self._has_arms_of(path)
        ]
        needed = {group.data for group in self.groups.values()}
        if plan.detail.packed is not None:
            needed.add(plan.detail.packed[0])
        for name in list(needed):  # one set may be built with another's tokenizer
            words = {word for command in plan.data[name] for word in command.split()}
            needed |= {other for other in plan.data if f"{{out}}/{other}" in words}
        self.data: dict[str, list[list[str]]] = {}
        for name, commands in plan.data.items():
            if name not in needed:
                continue
            if corpus is None and any("{corpus}" in command for command in commands):
                raise ValueError(
                    "this study reads documents of yours: give their folder with --corpus DIR "
                    "(make study CORPUS=DIR); training/studies/README.md says what lies in it"
                )
            self.data[name] = [
                [word.format(corpus=corpus, out=out) for word in shlex.split(command)]
                for command in commands
            ]

    def _has_arms_of(self, draft: Path) -> bool:
        """Whether the chosen groups have all arms that a draft names.

        Raises:
            ValueError: if the draft is not there, or names an arm or seed that no group has.
        """
        named = arms_of(draft)

        def trained(groups: Mapping[str, Group]) -> set[tuple[str, int]]:
            arms = [group.arms for group in groups.values()]
            return {(name, seed) for one in arms for name, seeds in one.items() for seed in seeds}

        unknown = sorted(named - trained(self.plan.groups))
        if unknown:
            arm, seed = unknown[0]
            raise ValueError(
                f"{draft} names {arm}, seed {seed}, which the study does not train. Add it to a "
                "group, or take it out of the draft."
            )
        return named <= trained(self.groups)

    @cached_property
    def arms(self) -> list[Arm]:
        """Every run, seeds of the detail first, so that a first picture comes early."""
        arms = []
        for group in self.groups.values():
            for name, seeds in group.arms.items():
                for seed in seeds:
                    path = self.plan.recipes / f"{name}.yaml"
                    overrides = {
                        "seed": seed,
                        "data.chunk_set": str(self.out / group.data),
                        "output_dir": str(self.out / "runs" / f"{name}_s{seed}"),
                    }
                    arms.append(Arm(path, load_recipe(path, overrides), group.data))
        return sorted(arms, key=lambda arm: arm.recipe.seed != self.plan.detail.seed)

    def runs(self, arms: Sequence[Arm] | None = None) -> list[Path]:
        """Run folders."""
        return [arm.recipe.run_dir for arm in (self.arms if arms is None else arms)]

    def build_data(self) -> None:
        """Build the chunk sets that are not there."""
        for name, commands in self.data.items():
            folder = self.out / name
            try:
                ChunkSet.open(folder, verify=True)
                print(f"  reusing {folder}")
                continue
            except ValueError:
                pass
            for command in commands:
                run("-m", *command)

    def train(self) -> None:
        """Train what is not done, `jobs` runs side by side; a cut run continues.

        Raises:
            SystemExit: if a run fails or is stopped; the others are stopped and saved.
        """
        waiting = []
        for arm in self.arms:
            if arm.is_done:
                print(f"  reusing {arm.recipe.run_dir}")
                remove_checkpoints(arm)
            else:
                waiting.append(arm)
        _RunsSideBySide(self.out / "logs", self.jobs).train(waiting)

    def score(self) -> None:
        """Score the development sets: training format, packed rows, and what is detailed."""
        detail = self.plan.detail
        for group in self.groups.values():
            arms = [arm for arm in self.arms if arm.recipe.name in group.arms]
            closer = [arm for arm in arms if arm.recipe.seed == detail.seed]
            self._score(arms, group.data, group.sets)
            if detail.packed is not None and group.data != detail.packed[0]:
                self._score(arms, detail.packed[0], [detail.packed[1]])
            if group.detailed:
                self._look_closely(closer, group.data)
            strided = [arm for arm in arms if arm.recipe.name in detail.strides]
            self._stride(strided, group.data, group.sets)
            if looked_at := [arm for arm in closer if arm.recipe.name in detail.attention]:
                chosen = ("--chunk_set", self.out / group.data, "--set", detail.set_name)
                run("-m", "evaluation.attention_diagnostic", *self.runs(looked_at), *chosen)
        self._mix(with_confirmation=False)

    def _look_closely(self, arms: Sequence[Arm], data: str) -> None:
        """Strides with both reaches and ablated tables (Sections 4.4 and 4.6)."""
        detail = self.plan.detail
        tables = [arm for arm in arms if arm.recipe.model.get("document_table", True)]
        self._stride(arms, data, [detail.set_name])
        self._score(tables, data, [detail.set_name], "--ablate_table")
        # The paper's ablation is of A + table under strides.
        both = [arm for arm in tables if arm.recipe.name in detail.attention]
        self._score(both, data, [detail.set_name], *_STRIDES, "window", "--ablate_table")

    def _stride(self, arms: Sequence[Arm], data: str, sets: Sequence[str]) -> None:
        """Strides with both reaches; what is there is reused."""
        for reach in ("window", "chunk"):
            self._score(arms, data, sets, *_STRIDES, reach)

    def _score(self, arms: Sequence[Arm], data: str, sets: Sequence[str], *how: str) -> None:
        if arms:
            chosen = ("--chunk_set", self.out / data, "--sets", *sets)
            run(*_on_all_devices(), "-m", "evaluation.score", *self.runs(arms), *chosen, *how)

    def _mix(self, with_confirmation: bool) -> None:
        """The output mixture on the base arms, fitted on the detail's set."""
        for group in self.groups.values():
            names = set(group.arms) & set(self.plan.detail.mixture)
            arms = [arm for arm in self.arms if arm.recipe.name in names]
            sets = list(group.sets)
            if with_confirmation:
                closed = self.confirmation_sets(group)
                arms = [arm for arm in arms if all(arm.has_scores(name) for name in closed)]
                sets += closed
            if not arms:
                continue
            run(
                *("-m", "evaluation.mixture", *self.runs(arms)),
                *("--chunk_set", self.out / group.data),
                *("--fit_set", self.plan.detail.set_name, "--sets", *sets),
            )

    def confirmation_sets(self, group: Group) -> list[str]:
        """The confirmation splits of a group's chunk set."""
        chunk_set = ChunkSet.open(self.out / group.data)
        return [s for s in chunk_set.evaluation_splits() if chunk_set.is_confirmation(s)]

    def report(self) -> None:
        """Tables, figures and model cards of what was scored, and the files behind them."""
        folder = self.out / "report"
        # Scores with the reach mistakes are in it on purpose, and marked (Section 4.6).
        run(
            *("-m", "evaluation.report", *self.runs(), "--out", folder),
            *("--quiet", "--show_violations", "--chunk_set", self.out / self.arms[0].data),
        )
        by_name = {arm.name: arm for arm in self.arms}
        for name in self.plan.cards:
            arm = by_name.get(f"{name}_s{self.plan.detail.seed}")
            if arm is None:
                continue
            baseline = by_name.get(f"{arm.recipe.baseline}_s{arm.recipe.seed}")
            beside = () if baseline is None else ("--baseline", baseline.recipe.run_dir)
            run("-m", "hub_cards.cards", arm.recipe.run_dir, *beside)
        copied = copy_evidence(self.runs(), self.out / "evidence")
        print(f"  {copied} files of records and results, without weights: {self.out / 'evidence'}")

    def register(self) -> None:
        """Register the drafts' contrasts, where the study has a confirmation."""
        if not self.plan.registration:
            print("  this study registers nothing")
        for path in self.plan.registration:
            if path not in [draft.path for draft in self._drafts]:
                print(f"  {path} is not registered: it names arms of groups that were not chosen")
        for draft in self._drafts:
            if draft.registration.is_file():
                draft.check()
                print(f"  reusing {draft.registration}")
                continue
            run(
                *("-m", "evaluation.protocol", "register", draft.path, *self.runs()),
                *("--chunk_set", self._long_data(), "--out", draft.registration),
            )

    def confirm(self) -> None:
        """Score the confirmation set once, and judge."""
        for draft in self._drafts:
            if draft.confirmation.is_file():
                print(f"  reusing {draft.confirmation}")
                continue
            run(
                *("-m", "evaluation.protocol", "confirm", draft.registration, *self.runs()),
                *("--chunk_set", self._long_data(), "--out", draft.confirmation),
            )
        if self._drafts:
            self._mix(with_confirmation=True)

    def steps(self) -> list[tuple[str, Callable[[], object]]]:
        """What a study does, in the order of `STEPS`."""
        return [
            ("Data", self.build_data),
            (f"Train {len(self.arms)} runs", self.train),
            ("Score the development sets", self.score),
            ("Register contrasts and predictions (Section 3.6)", self.register),
            ("Score the confirmation set, once", self.confirm),
        ]

    def estimate(self) -> str:
        """What is left to train, and what it takes here."""
        from training.study_cost import estimate  # torch takes seconds to import

        left = [arm.recipe for arm in self.arms if not arm.is_done]
        built = all((self.out / name / "manifest.json").is_file() for name in self.data)
        download = 0.0 if built else self.plan.download_gigabytes
        return estimate(left, download, self.plan.data_gigabytes, self.jobs)

    def _long_data(self) -> Path:
        """The chunk set that has a confirmation split: the first group's."""
        return self.out / next(iter(self.groups.values())).data


def _on_all_devices() -> tuple[str, ...]:
    """The launcher where there are GPUs."""
    import torch  # takes seconds, of which most steps need none

    return LAUNCHER if torch.cuda.is_available() else ()


def remove_checkpoints(arm: Arm) -> None:
    """Of a finished run: the optimizer's state has done its work, and final/ holds the model."""
    shutil.rmtree(arm.recipe.run_dir / "checkpoints", ignore_errors=True)


class _RunsSideBySide:
    """Trains runs, some at once; one alone shows its progress, several write to log files."""

    def __init__(self, logs: Path, jobs: int) -> None:
        self.logs, self.jobs = logs, jobs
        self.failed: list[str] = []
        self.running: list[subprocess.Popen[bytes]] = []

    def train(self, arms: Sequence[Arm]) -> None:
        if self.jobs == 1:
            for arm in arms:
                print(f"\n  {arm.name}: {arm.recipe.description}", flush=True)
                run(*LAUNCHER, "-m", *arm.command)
                remove_checkpoints(arm)
            return
        self.logs.mkdir(parents=True, exist_ok=True)
        print(f"  {len(arms)} runs, {self.jobs} side by side; progress in {self.logs}", flush=True)
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                list(pool.map(self._train_one, arms))
            except KeyboardInterrupt:
                # The runs got the same signal: they save and stop.
                self.failed.append("interrupted")
                pool.shutdown(cancel_futures=True)
        if self.failed:
            print(
                f"error: {'; '.join(self.failed)}. The same command goes on from the last "
                "checkpoints.",
                file=sys.stderr,
            )
            sys.exit(_STOPPED if "interrupted" in self.failed else 1)

    def _train_one(self, arm: Arm) -> None:
        if self.failed:
            return
        threads = max(1, (os.cpu_count() or 1) // self.jobs)
        began = time.perf_counter()
        log = self.logs / f"{arm.name}.log"
        command = [sys.executable, "-m", *arm.command, "--num_threads", str(threads)]
        with log.open("ab") as stream:
            environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
            process = start(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
            self.running.append(process)
            code = process.wait()
            self.running.remove(process)
        if code:
            self.failed.append(f"{arm.name} ended with exit code {code}, see {log}")
            for other in list(self.running):
                other.send_signal(signal.SIGTERM)
            return
        remove_checkpoints(arm)
        print(f"  {arm.name}  {time.perf_counter() - began:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    given = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(command_line.normalise_flags(given))
    return command_line.run(lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> None:
    plan = read_study(arguments.study)
    study = Study(plan, arguments.out, arguments.corpus, arguments.groups, arguments.jobs)
    print(f"{plan.title}\n{study.estimate()}", flush=True)
    if not arguments.yes and not _agreed():
        return
    forward_sigterm()
    last = STEPS.index(arguments.until)
    for title, work in study.steps()[: last + 1]:
        with Phase(title):
            work()
    if last < STEPS.index("scores"):
        return
    with Phase("Report"):
        study.report()
    print(f"\nstart at {arguments.out / 'report' / 'report.md'}")


def _agreed() -> bool:
    """Ask at a terminal; elsewhere nobody could answer, so --yes must have been given.

    Raises:
        ValueError: where there is no terminal.
    """
    if not sys.stdin.isatty():
        raise ValueError("give --yes to start without being asked (make study YES=1)")
    return input("Start? [y/N] ").strip().lower() in ("y", "yes")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training.study", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("study", type=Path, metavar="STUDY", help="a YAML of training/studies/")
    parser.add_argument("--out", type=Path, required=True, help="the study's folder")
    parser.add_argument("--corpus", type=Path, help="folder of your documents, if it reads any")
    parser.add_argument("--groups", nargs="+", default=(), help="groups to run; default: all")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs trained side by side; on a CPU small models gain by one job a core (1)",
    )
    parser.add_argument(
        "--until", choices=STEPS, default=STEPS[-1], help="stop after this step (%(default)s)"
    )
    parser.add_argument("--yes", action="store_true", help="start without asking")
    return parser


if __name__ == "__main__":
    sys.exit(main())
