"""Upload of a finished run: its last checkpoint and a model card, as one commit to the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from miles.cluster.hub_client import CONFIG_FILES, WEIGHT_FILES, HubError, name_from_folder
from miles.config.provenance import flatten_values
from miles.config.schema import get_options
from miles.config.value_types import format_value
from miles.core.errors import describe_error
from miles.core.hub_names import parse_hub_name, split_entry
from miles.launch.config import Config
from miles.launch.hub.resolve import describe_name, describe_names
from miles.launch.rules.paths import find_newest_checkpoint
from miles.models.checkpoint.torch_dist_folders import is_torch_dist
from miles.observe.log_reader import read_rows

README = "README.md"
_OWN_STATE = ("optimizer*", "trainer.json", "cursor.json", "manifest.json", "conversion.json", README)
_SECTIONS = ("models", "rollout", "tools", "multi_agent", "algo", "train", "lora", "schedule")
_PACKAGES = ("miles-rl", "torch", "transformers")
_CURVE_ROWS = 12
_LICENSE = re.compile(r"^license: *(\S+) *$", re.MULTILINE)


def push_to_hub(config: Config, run: Path, token: str) -> str:
    """Upload the newest checkpoint of ``run`` with its model card; returns the address of the commit.

    The files are one commit: the repository has all of them or none. HubError says why it could not be made.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    repo, folder = config.hub.push_to_hub, find_newest_checkpoint(run)
    assert repo is not None, "--push-to-hub is set"
    if folder is None:
        raise HubError(f"{run} has no checkpoint to upload.")
    api, revision = HfApi(token=token), config.hub.hub_revision
    try:
        with _open_model(folder) as model:
            operations = [CommitOperationAdd(file.name, file) for file in list_uploaded_files(model)]
            operations.append(CommitOperationAdd(README, build_model_readme(config, run).encode()))
            api.create_repo(repo, private=config.hub.hub_private or None, exist_ok=True)
            if revision is not None:
                api.create_branch(repo, branch=revision, exist_ok=True)
            done = api.create_commit(
                repo, operations, commit_message=f"Upload {folder.name} of {run.name}", revision=revision
            )
    except Exception as error:
        reason = (describe_error(error).splitlines() or [""])[0]
        raise HubError(
            f"{folder} could not be uploaded to {repo}: {reason} The run itself is complete; the same command tries "
            "again."
        ) from error
    return done.commit_url


@contextmanager
def _open_model(checkpoint: Path) -> Iterator[Path]:
    """The checkpoint as a Hugging Face folder: itself, or a copy that is removed, of one in Megatron's format."""
    if not is_torch_dist(checkpoint):
        yield checkpoint
        return
    # Imported when chosen: it names another backend.
    from miles.backends.megatron.convert import export_hf

    with TemporaryDirectory(dir=checkpoint.parents[1], prefix=".upload-") as folder:
        export_hf(checkpoint, Path(folder) / checkpoint.name)
        yield Path(folder) / checkpoint.name


def list_uploaded_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that make it a model: weights, config and tokenizer, not the state of the run."""
    files = (file for file in sorted(folder.iterdir()) if file.is_file())
    wanted = (*CONFIG_FILES, *WEIGHT_FILES)
    return [file for file in files if _is_match(file, wanted) and not _is_match(file, _OWN_STATE)]


def _is_match(file: Path, patterns: Sequence[str]) -> bool:
    return any(file.match(pattern) for pattern in patterns)


def build_model_readme(config: Config, run: Path) -> str:
    """The model card: what was trained from what, with which options, and how the reward went."""
    header = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": _name_base(config),
        "datasets": sorted(_list_datasets(config)),
        "license": _read_license(config),
        "tags": ["reinforcement-learning", "miles", _name_algorithm(config)],
    }
    parts = [
        *_format_header({key: value for key, value in header.items() if value}),
        f"# {(config.hub.push_to_hub or run.name).rpartition('/')[2]}",
        "",
        f"Trained from {_describe_path(str(config.models.hf_checkpoint))} with {_name_algorithm(config)} by Miles.",
        *_format_table("Data", ("set", "entry"), _list_data(config)),
        *_format_table("Reward", ("step", "mean reward"), _sample_curve(run)),
        *_format_table("Options that are not at their defaults", ("option", "value"), _list_options(config)),
        *_format_table("Versions", ("package", "version"), _list_versions()),
    ]
    return "\n".join(parts) + "\n"


def _format_header(values: Mapping[str, Any]) -> Iterator[str]:
    yield "---"
    for key, value in values.items():
        if isinstance(value, list):
            yield from (f"{key}:", *(f"- {item}" for item in value))
        else:
            yield f"{key}: {value}"
    yield from ("---", "")


def _format_table(title: str, head: tuple[str, str], rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    if rows:
        yield from ("", f"## {title}", "", f"| {head[0]} | {head[1]} |", "|---|---|")
        yield from (f"| {left} | {right} |" for left, right in rows)


def _name_algorithm(config: Config) -> str:
    loss = config.algo.loss_type
    return config.algo.advantage_estimator if loss == "policy_loss" else loss.removesuffix("_loss")


def _name_base(config: Config) -> str | None:
    name = name_from_folder(config.models.hf_checkpoint or "")
    return None if name is None else name.repo


def _list_datasets(config: Config) -> set[str]:
    entries = (*config.rollout.prompt_data, *config.rollout.eval_prompt_data[1::2])
    names = (parse_hub_name("dataset", split_entry(entry)[0]) for entry in entries)
    return {name.repo for name in names if name is not None}


def _read_license(config: Config) -> str | None:
    """The licence in the header of the base model's own card."""
    card = Path(config.models.hf_checkpoint or "") / README
    found = _LICENSE.search(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    return None if found is None else found[1]


def _list_data(config: Config) -> list[tuple[str, str]]:
    training = [("training", _describe_path(entry)) for entry in config.rollout.prompt_data]
    pairs = config.rollout.eval_prompt_data
    return training + [(name, _describe_path(path)) for name, path in zip(pairs[::2], pairs[1::2], strict=True)]


def _describe_path(text: str) -> str:
    """A name on the hub as it is; of a path the last part, since folders of a machine are nobody's business."""
    found = describe_name(text)
    return Path(found).name if found.startswith(("/", "~", ".")) else found


def _list_options(config: Config) -> list[tuple[str, str]]:
    values, rows = flatten_values(describe_names(config)), []
    for option in get_options(Config).values():
        value = values[option.name]
        if option.section not in _SECTIONS or value == option.default or "url" in option.name:
            continue
        texts = value if isinstance(value, tuple) else (value,)
        shown = " ".join(_describe_path(t) if isinstance(t, str) else format_value(t) for t in texts)
        rows.append((f"`--{option.name.replace('_', '-')}`", f"`{shown}`".replace("|", "\\|").replace("\n", " ")))
    return rows


def _sample_curve(run: Path) -> list[tuple[str, str]]:
    """The mean reward at evenly spaced steps, the first and the last among them."""
    rows = [row for row in read_rows(run / "metrics.jsonl").select("train") if "reward" in row.values]
    last = len(rows) - 1
    picked = sorted({round(i * last / (_CURVE_ROWS - 1)) for i in range(_CURVE_ROWS)}) if rows else ()
    return [(str(rows[i].step), f"{rows[i].values['reward']:.4g}") for i in picked]


def _list_versions() -> list[tuple[str, str]]:
    found = []
    for package in _PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return found
