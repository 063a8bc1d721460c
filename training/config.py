"""Typed recipes: YAML files that state only what differs from their base, plus overrides.

Every field of a recipe stands in one of the dataclasses below, with its meaning; `model` holds
fields of DocTabConfig. An unknown key anywhere is an error that names it.
"""

import argparse
import dataclasses
import difflib
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml


@dataclass(frozen=True)
class DataConfig:
    """What the run trains on."""

    chunk_set: str | None = None
    """Folder that `python -m data_scripts.build` wrote."""
    split: str = "train"
    """Split of the chunk set to train on."""
    chunk_length: int = 8192
    """Targets of one chunk; must be that of the chunk set. The lookup searches one chunk."""
    table_source: str = "document"
    """Where table fields come from: document, or a control, foreign, shuffled or empty."""
    table_dropout: float = 0.0
    """Share of rows whose table fields are all "no match" (Section 4.5)."""


@dataclass(frozen=True)
class TrainingConfig:
    """Length, batch and execution of the run."""

    num_updates: int = 953
    """Optimizer updates."""
    tokens_per_update: int = 2**19
    """Target tokens of one update, over all processes."""
    tokens_per_micro_batch: int = 2**17
    """Target tokens of one forward pass of one process; a multiple of the chunk length."""
    precision: str = "auto"
    """bf16 (autocast) or fp32; auto is bf16 on a GPU and fp32 on a CPU."""
    recomputation: bool | str = "auto"
    """Recompute each block in the backward pass; auto does so where memory would be short."""
    compile: bool | str = "auto"
    """torch.compile each block; auto does so on a GPU."""
    attn_implementation: str | None = None
    """Attention implementation of transformers; None chooses by device."""
    checkpoint_every: int = 100
    """Updates between checkpoints; 0 for none but the last."""
    keep_last: int = 2
    """Newest checkpoints to keep."""
    keep_every: int = 0
    """Also keep every checkpoint whose update is a multiple of this; 0 for none."""
    evaluate_every: int = 0
    """Updates between in-loop evaluations; 0 for none. They never change the training result."""
    evaluation_split: str = "dev_val"
    """Split that in-loop evaluation reads."""
    evaluation_chunks: int = 16
    """Number of its first full chunks that in-loop evaluation scores."""
    num_threads: int | str = "auto"
    """CPU threads of each process; auto divides the machine's cores."""
    num_loader_threads: int = 2
    """Threads that prepare batches ahead."""
    trackers: tuple[str, ...] = ()
    """Trackers of accelerate to report to as well, e.g. [tensorboard]; none can stop a run."""
    profile_updates: tuple[int, int] | None = None
    """First and last update to profile; the trace goes to profile.json.gz in the run folder."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Muon for the matrices inside the layers, AdamW for the rest (reference recipe)."""

    matrix_lr: float = 0.04
    """Muon's rate, before the factor sqrt(max(1, rows / columns))."""
    embedding_lr: float = 0.6
    """Token and value embeddings and all tables, before the width factor."""
    head_lr: float = 0.004
    """lm_head, before the width factor."""
    resid_lr: float = 0.005
    """resid_lambdas."""
    x0_lr: float = 0.5
    """x0_lambdas."""
    gain_lr: float = 0.05
    """Query gains of the temperature arms; the paper gives no rate, this is our choice."""
    reference_width: int = 768
    """Embedding and head rates are multiplied by sqrt(reference_width / hidden_size)."""
    weight_decay: float = 0.2
    """Muon's cautious weight decay at the start; it falls linearly to 0."""
    momentum_start: float = 0.85
    """Muon's momentum at update 0."""
    momentum_end: float = 0.95
    """Muon's momentum after its ramp."""
    momentum_ramp_updates: int = 300
    """Length of that ramp, in updates."""
    muon_beta2: float = 0.95
    """Decay of NorMuon's second moment."""
    shard_iterations: bool = False
    """Divide Muon's iterations over the processes; for many GPUs and large matrices."""
    iteration_dtype: str = "auto"
    """Type of Muon's iterations: bfloat16 or float32; auto is bfloat16 on a GPU."""
    adam_betas: tuple[float, float] = (0.8, 0.95)
    """AdamW's betas."""
    x0_betas: tuple[float, float] = (0.96, 0.95)
    """AdamW's betas for x0_lambdas."""
    adam_eps: float = 1e-10
    """AdamW's epsilon."""
    cooldown_fraction: float = 0.5
    """Last part of the run in which all rates fall linearly to 0."""


@dataclass(frozen=True)
class Recipe:
    """One arm: everything that determines a run but the machine."""

    name: str
    """The arm, also in file names; letters, digits, _ and -."""
    description: str = ""
    """One line: which row of the paper this is, on which hardware."""
    baseline: str | None = None
    """Name of the arm that this one is compared with."""
    seed: int = 44
    """Touches initialisation and table dropout only, never the data order."""
    output_dir: str | None = None
    """Run folder; runs/NAME_sSEED by default."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of DocTabConfig; table_reach defaults to data.chunk_length."""
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def run_dir(self) -> Path:
        """Where the run is written."""
        return Path(self.output_dir or f"runs/{self.name}_s{self.seed}")

    def as_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, as in YAML."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def sha256(self) -> str:
        """Hash of what determines the result: everything but paths and execution settings."""
        plain = self.as_dict()
        for key in ("output_dir", "description"):
            plain.pop(key)
        plain["data"].pop("chunk_set")
        plain["optimizer"].pop("shard_iterations")
        for key in EXECUTION_KEYS:
            plain["training"].pop(key)
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


# How a run is carried out; a resumed run may change them.
EXECUTION_KEYS = (
    *("tokens_per_micro_batch", "recomputation", "compile", "attn_implementation"),
    *("checkpoint_every", "keep_last", "keep_every", "num_threads", "num_loader_threads"),
    *("evaluate_every", "evaluation_split", "evaluation_chunks"),
    *("trackers", "profile_updates"),
)

SECTIONS = {"data": DataConfig, "training": TrainingConfig, "optimizer": OptimizerConfig}
TOP_LEVEL = [f.name for f in dataclasses.fields(Recipe) if f.name not in (*SECTIONS, "model")]


def load_recipe(path: str | Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe and its bases, apply overrides, and check every key and value.

    Args:
        path: YAML file. `base: other.yaml`, relative to it, names the recipe it starts from.
        overrides: dotted or unique short key -> value, e.g. {"training.num_updates": 20}.

    Raises:
        ValueError: naming the file, the key and what is allowed.
    """
    plain = _read_with_bases(Path(path), ())
    for key, value in (overrides or {}).items():
        section, name = resolve_key(key)
        (plain.setdefault(section, {}) if section else plain)[name] = value
    return build_recipe(plain, str(path))


def resolve_key(key: str) -> tuple[str | None, str]:
    """(section, field) of `section.field` or of a field name that one section has."""
    key = key.replace("-", "_")
    if key.startswith("model."):
        return "model", key.removeprefix("model.")
    homes: list[tuple[str | None, str]] = [(None, name) for name in TOP_LEVEL if name == key]
    for section, cls in SECTIONS.items():
        homes += [
            (section, f.name)
            for f in dataclasses.fields(cls)
            if key in (f.name, f"{section}.{f.name}")
        ]
    if len(homes) != 1:
        known = TOP_LEVEL + [
            f"{s}.{f.name}" for s, cls in SECTIONS.items() for f in dataclasses.fields(cls)
        ]
        raise ValueError(f"no recipe key {key!r}{_suggestion(key, known)}")
    return homes[0]


def build_recipe(plain: dict[str, Any], where: str) -> Recipe:
    """A checked Recipe from nested dictionaries; `where` names their origin in errors."""
    arguments = dict(plain)
    for section, cls in SECTIONS.items():
        arguments[section] = _build(cls, arguments.get(section) or {}, f"{where}: {section}.")
    recipe = _build(Recipe, arguments, f"{where}: ")
    _check(recipe, where)
    return recipe


def _read_with_bases(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path in seen:
        raise ValueError(f"{path}: a recipe cannot be its own base ({' -> '.join(map(str, seen))})")
    if not path.is_file():
        raise ValueError(f"{path}: no such recipe file")
    try:
        plain = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(plain, dict):
        raise ValueError(f"{path}: a recipe is a mapping of keys, got {type(plain).__name__}")
    for section in (*SECTIONS, "model"):
        if section in plain and plain[section] is None:
            plain[section] = {}  # a heading with nothing below it changes nothing
        if not isinstance(plain.get(section, {}), dict):
            raise ValueError(
                f"{path}: {section}: a section is a mapping of keys, got {plain[section]!r}"
            )
    base = plain.pop("base", None)
    if base is None:
        return plain
    return _merge(_read_with_bases(path.parent / base, (*seen, path)), plain)


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _build(cls: type, values: dict[str, Any], where: str) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{where} a section is a mapping of keys, got {values!r}")
    hints = get_type_hints(cls)
    unknown = sorted(set(values) - set(hints), key=str)
    if unknown:
        raise ValueError(f"{where}{unknown[0]} is not a recipe key{_suggestion(unknown[0], hints)}")
    try:
        typed = {k: _coerce(v, hints[k], f"{where}{k}") for k, v in values.items()}
        return cls(**typed)
    except TypeError as error:
        raise ValueError(f"{where}{error}") from error


def _coerce(value: Any, hint: Any, where: str) -> Any:
    """The value in its field's type; integers pass as floats, lists as tuples."""
    if dataclasses.is_dataclass(hint):
        return value
    options = get_args(hint) if str(hint).find("|") >= 0 else (hint,)
    for option in options:
        base = getattr(option, "__origin__", option)
        if base is tuple and isinstance(value, list | tuple):
            kinds = get_args(option)
            if kinds[-1] is Ellipsis:
                kinds = (kinds[0],) * len(value)
            if len(value) == len(kinds):
                items = zip(value, kinds, strict=True)
                return tuple(_coerce(v, kind, where) for v, kind in items)
            continue
        if base is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if base is float and isinstance(value, str):
            try:
                return float(value)  # YAML reads 1e-10 as a string
            except ValueError:
                continue
        if base is int and isinstance(value, bool):
            continue
        if option is type(None) and value is None:
            return None
        if base is Any or isinstance(value, base):
            return value
    names = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise ValueError(f"{where} must be {names}; got {value!r}")


def _suggestion(key: Any, known: Any) -> str:
    names = sorted(known)
    tails = {n.rsplit(".", 1)[-1]: n for n in names}
    close = difflib.get_close_matches(str(key).rsplit(".", 1)[-1], list(tails), n=1)
    return f"; did you mean {tails[close[0]]}?" if close else f"; known: {', '.join(names)}"


def _check(recipe: Recipe, where: str) -> None:
    t, d = recipe.training, recipe.data

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{where}: {message}")

    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
    require(
        bool(recipe.name) and set(recipe.name) <= allowed,
        f"name {recipe.name!r} must be letters, digits, _ and -",
    )
    least_one = ("num_updates", "tokens_per_update", "tokens_per_micro_batch", "keep_last")
    for key in (*least_one, "evaluation_chunks"):
        value = getattr(t, key)
        require(value >= 1, f"training.{key} must be at least 1; got {value}")
    row = recipe.model.get("max_position_embeddings", 2048)
    require(
        isinstance(row, int) and row > 0 and d.chunk_length % row == 0,
        "data.chunk_length must be a multiple of the row length, "
        f"model.max_position_embeddings; got {d.chunk_length} and {row}",
    )
    require(
        t.tokens_per_micro_batch % d.chunk_length == 0,
        "training.tokens_per_micro_batch must be a multiple of data.chunk_length; got "
        f"{t.tokens_per_micro_batch} and {d.chunk_length}",
    )
    require(
        t.tokens_per_update % t.tokens_per_micro_batch == 0,
        "training.tokens_per_update must be a multiple of training.tokens_per_micro_batch; "
        f"got {t.tokens_per_update} and {t.tokens_per_micro_batch}",
    )
    choices = {
        "data.table_source": (d.table_source, ("document", "foreign", "shuffled", "empty")),
        "training.precision": (t.precision, ("auto", "bf16", "fp32")),
        "training.recomputation": (t.recomputation, ("auto", True, False)),
        "training.compile": (t.compile, ("auto", True, False)),
        "optimizer.iteration_dtype": (
            recipe.optimizer.iteration_dtype,
            ("auto", "bfloat16", "float32"),
        ),
    }
    for key, (value, options) in choices.items():
        require(value in options, f"{key} must be one of {options}; got {value!r}")
    require(
        0 <= d.table_dropout < 1, f"data.table_dropout must be in [0, 1); got {d.table_dropout}"
    )


def add_override_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag a recipe key, `--num_updates` or `--training.num_updates`; help from the fields."""
    for section, cls in ((None, Recipe), *SECTIONS.items()):
        title = f"recipe overrides: {section}" if section else "recipe overrides"
        group = parser.add_argument_group(title)
        for f in dataclasses.fields(cls):
            if section is None and f.name not in TOP_LEVEL:
                continue
            dotted = f"{section}.{f.name}" if section else f.name
            flags = {f"--{n}" for n in (f.name, dotted, f.name.replace("_", "-"))}
            group.add_argument(
                *sorted(flags, key=len),
                dest=f"override:{dotted}",
                metavar="VALUE",
                type=yaml.safe_load,
                default=argparse.SUPPRESS,
                help=_field_help(cls, f.name),
            )
    parser.add_argument_group("recipe overrides: model").add_argument(
        "--model",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of DocTabConfig, e.g. --model short_window=512 (repeatable)",
    )


def overrides_from(arguments: argparse.Namespace) -> dict[str, Any]:
    """The overrides that were given on the command line, as `load_recipe` takes them."""
    prefix = "override:"
    found = {k.removeprefix(prefix): v for k, v in vars(arguments).items() if k.startswith(prefix)}
    for item in arguments.model:
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--model takes FIELD=VALUE; got {item!r}")
        found[f"model.{name}"] = yaml.safe_load(value)
    return found


def _field_help(cls: type, name: str) -> str:
    """The sentence under a field in the source, so that it is written once."""
    import inspect

    lines = inspect.getsource(cls).splitlines()
    for i, line in enumerate(lines):
        if line.strip().startswith(f"{name}:"):
            following = lines[i + 1].strip() if i + 1 < len(lines) else ""
            return following.strip('"').replace("%", "%%") if following.startswith('"""') else ""
    return ""
