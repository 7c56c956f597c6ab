"""``miles adopt``: from a new checkpoint to a run: definition, plan, parity with transformers, recipe."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles.cluster.hub_client import get_model_name
from miles.config.files import Layer
from miles.core.errors import MilesError, UsageError
from miles.launch.adopt.layout import Layout, choose_layout, read_shared_layers
from miles.launch.adopt.small_config import shrink_config
from miles.launch.config import AdoptOptions, ParityOptions
from miles.launch.hub.resolve import resolve_model
from miles.launch.plan.hardware import get_free_memory
from miles.launch.recipes.catalog import PLANNED_ONLY
from miles.launch.recipes.fit import format_gb
from miles.launch.recipes.standalone import format_standalone
from miles.launch.rules.paths import find_checkpoint_problem
from miles.models.accounting.params import active_parameter_count, parameter_count
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families.registry import match_family
from miles.models.hf_adapter.model_class import find_named_class
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.resolve import ModelImpl, is_known_to_transformers, resolve_spec
from miles.models.spec import DecoderSpec

_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What computes a model: its spec, and the --model-impl that chooses it; ``why`` where it is transformers."""

    spec: DecoderSpec
    impl: ModelImpl
    why: tuple[str, ...] = ()


def adopt(model: str, options: AdoptOptions) -> int:
    """Check a checkpoint and write its recipe; 0 if parity holds or was not asked for, else 1."""
    shared = read_shared_layers(options.hardware, options.task)
    file = Path(options.output or f"{get_model_name(model)}.toml")
    if file.suffix != ".toml":
        raise UsageError(f"--output {file} is not a .toml file; name one.")
    if file.exists():
        raise UsageError(f"{file} exists already; choose another name with --output.")
    folder = Path(resolve_model(model, weights=options.weights == "real"))
    if problem := find_checkpoint_problem(folder):
        raise UsageError(f"{model} {problem}")
    definition = find_definition(folder, trust_remote_code=options.trust_remote_code)
    _print_definition(model, definition)
    layout = choose_layout(folder, definition.spec, shared, definition.impl)
    _print_layout(layout, options.hardware)
    code = _check_parity(folder, definition, options)
    file.write_text(_format_recipe(model, definition, layout, options), encoding="utf-8")
    print(f"\nrecipe     {file}\nnext       miles plan {file}, then miles check {file} and miles train {file}")
    return code


# -- definition -----------------------------------------------------------------------------


def find_definition(folder: Path, *, trust_remote_code: bool) -> Definition:
    """The native definition of a checkpoint, else transformers' own module; UsageError where neither serves it."""
    try:
        return Definition(spec=resolve_spec(folder, "native"), impl="auto")
    except UsageError as error:
        why = error.problems
    config = read_config(folder)
    own_code = bool(config.get("auto_map"))
    if own_code and not trust_remote_code and not is_known_to_transformers(str(config.get("model_type"))):
        raise UsageError(
            [*why, f"{folder} has its own code; with --trust-remote-code transformers runs it, if you trust it."]
        )
    return Definition(spec=resolve_spec(folder, "transformers"), impl="transformers", why=tuple(why))


def _print_definition(model: str, definition: Definition) -> None:
    spec = definition.spec
    size, active = parameter_count(spec), active_parameter_count(spec)
    experts = "" if active == size else f", {active / 1e9:,.2f}B active per token"
    print(f"model      {model}: {size / 1e9:,.2f}B parameters{experts}, {spec.num_layers} layers")
    if definition.impl == "auto":
        print(f"served by  the definition of {spec.family}: exact parity, CUDA graphs and parallel sizes apply")
        return
    architecture = spec.architecture if isinstance(spec, HfAdapterSpec) else spec.family
    print(f"served by  transformers' module for {architecture} (--model-impl transformers): slower, on one GPU")
    for problem in definition.why:
        print(f"           {problem}")


def _print_layout(layout: Layout, hardware: str) -> None:
    fit = layout.fit
    print(f"layout     {hardware}: {layout.note}")
    sampling = ""
    if fit.plan.samples:
        sampling = f", {format_gb(fit.sampling)} while sampling beside a KV cache of {fit.requests} full sequences"
    print(f"memory     {format_gb(fit.training)} of a GPU while training{sampling}; {format_gb(fit.usable)} usable")


# -- parity ---------------------------------------------------------------------------------


def _check_parity(folder: Path, definition: Definition, options: AdoptOptions) -> int:
    """Compare the native definition with transformers; prints why where nothing is compared."""
    if options.weights == "none":
        print("parity     not measured: --weights none")
        return 0
    if definition.impl == "transformers":
        print("parity     nothing to compare: engine and trainer both run transformers' own module")
        return 0
    kind = _choose_weights(folder, definition.spec, options)
    if kind == "real":
        print("parity     of the checkpoint's own weights:\n")
        return _compare_with_transformers(folder, options)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            small = write_random_model(read_config(folder), Path(scratch))
        except MilesError as error:
            print(f"parity     NOT measured: no small model could be made ({error}); try --weights real")
            return 1
        print("parity     of random weights in a small model with the same config:\n")
        return _compare_with_transformers(small, options)


def _choose_weights(folder: Path, spec: DecoderSpec, options: AdoptOptions) -> Literal["real", "random"]:
    has_weights = any(folder.glob("*.safetensors"))
    if options.weights == "real" and not has_weights:
        raise UsageError(f"--weights real needs the weights of {folder}; download them, or use --weights random.")
    if options.weights != "auto":
        return "real" if options.weights == "real" else "random"
    free = get_free_memory()
    return "real" if has_weights and free is not None and 2 * _FLOAT32 * parameter_count(spec) < free else "random"


def _compare_with_transformers(folder: Path, options: AdoptOptions) -> int:
    from miles.launch.parity.command import parity

    return parity(
        str(folder),
        ParityOptions(
            a="native",
            b="transformers",
            dtype="float32",
            device=options.device,
            trust_remote_code=options.trust_remote_code,
        ),
    )


def write_random_model(config: Mapping[str, Any], folder: Path) -> Path:
    """A small model with random weights, made and saved by transformers.

    It is the language model alone where transformers has a class for it, else the whole model with a small tower.
    """
    import torch

    small = shrink_config(complete_hf_config(_get_decoder_config(config)))
    (folder / "config.json").write_text(json.dumps(small))
    model_class = find_named_class(small)
    if model_class is None:
        raise UsageError(f"transformers has no {next(iter(small.get('architectures') or ()), 'class')} to compare with")
    torch.manual_seed(0)
    model = _build_hf_model(model_class, small)
    with torch.no_grad():  # initial weights are too small for a mistake to show
        for param in model.parameters():
            noise = torch.randn_like(param)
            param.copy_(1 + 0.2 * noise if param.dim() == 1 else 0.04 * noise)
    model.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**small, **written}))
    return folder


def _build_hf_model(model_class: Any, config: dict[str, Any]) -> Any:
    """The model in float32; with a padding token where its class wants one."""
    padded = {**config, "pad_token_id": 0}
    if "text_config" in config:
        padded = {**config, "text_config": {**config["text_config"], "pad_token_id": 0}}
    reasons: list[str] = []
    for values in (config, padded):
        try:
            hf_config = model_class.config_class(**values)
            hf_config._attn_implementation = "eager"
            return model_class(hf_config).float()
        except Exception as error:  # whatever transformers checks
            reasons.append(" ".join(str(error).split()))
    raise UsageError(f"transformers does not build it: {reasons[0]}")


def _get_decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model, where transformers has a class for it alone; else the whole config."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    whole = find_named_class(config)
    parts = getattr(getattr(whole, "config_class", None), "sub_configs", {})
    model_type = text.get("model_type") or getattr(parts.get("text_config"), "model_type", None)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(model_type))
    if name is None and find_named_class(text) is not None:
        name = text["architectures"][0]
    if name is None and whole is None and (family := match_family(text)) is not None:
        name = family.architectures[0]
    return config if name is None else {**text, "model_type": model_type, "architectures": [name]}


def complete_hf_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as transformers' class of its architecture wants it: with the model type and the tower of that class."""
    completed = dict(config)
    config_class = getattr(find_named_class(config), "config_class", None)
    if config_class is None:
        return completed
    completed["model_type"] = config_class.model_type  # published configs may name the type of their own code
    tower = getattr(config_class, "sub_configs", {}).get("vision_config")
    # A config that was made to plan with says little of its tower.
    if tower is not None and len(config.get("vision_config") or ()) < 2:
        completed["vision_config"] = tower().to_dict() if hasattr(tower, "to_dict") else {}
    return completed


# -- recipe ---------------------------------------------------------------------------------


def _format_recipe(model: str, definition: Definition, layout: Layout, options: AdoptOptions) -> str:
    """The recipe as one file."""
    *shared, own = layout.layers
    name = get_model_name(model)
    models = {"hf_checkpoint": model if not Path(model).is_dir() else str(Path(model).resolve())}
    values = {**own.values, "models": {**models, **own.values.get("models", {})}}
    about = {
        "title": f"{name} on {options.hardware}",
        "family": definition.spec.family,
        "tried": PLANNED_ONLY,
    }
    layers = (*shared, Layer(label="adopt", values=values, about=about))
    return format_standalone(layers, [f"{name}, for {options.hardware}: {layout.note}."])
