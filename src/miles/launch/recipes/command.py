"""``miles recipes``, ``miles init`` and ``miles compare``: list recipes, copy one, hold runs to its curve."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from miles import __version__
from miles.config.help import get_terminal_width
from miles.core.errors import UsageError
from miles.launch.config import CompareOptions, InitOptions, RecipesOptions
from miles.launch.recipes.catalog import (
    Recipe,
    describe_path,
    find_recipe,
    find_recipes_folder,
    list_recipes,
    select_recipes,
)
from miles.launch.recipes.fit import format_gb, plan_recipe
from miles.launch.recipes.reference_curve import (
    MetricVerdict,
    ReferenceCurve,
    build_curve,
    compare_run,
    read_curve,
    write_curve,
)
from miles.launch.recipes.standalone import format_standalone


def recipes(name: str | None, options: RecipesOptions) -> int:
    """List the recipes that match, or describe one of them; 1 if none matches."""
    if name is not None:
        print(describe_recipe(find_recipe(name)))
        return 0
    found = select_recipes(list_recipes(), family=options.family, hardware=options.hardware, task=options.task)
    if not found:
        print("No recipe matches; miles recipes lists all of them.")
        return 1
    rows = [("NAME", "HARDWARE", "TASK", "TRIED"), *map(_list_columns, found)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join([*(text.ljust(width) for text, width in zip(row[:3], widths, strict=True)), row[3]]))
    print(f"\n{len(found)} recipes in {describe_path(find_recipes_folder())}.")
    print("miles recipes NAME describes one with its memory plan, miles init NAME writes a copy to adapt.")
    return 0


def _list_columns(recipe: Recipe) -> tuple[str, str, str, str]:
    return recipe.name, "any" if recipe.hardware is None else recipe.hardware.name, recipe.task, recipe.tried


def describe_recipe(recipe: Recipe) -> str:
    """What a recipe is for, its memory plan, and what was tried."""
    rows = [
        ("file", describe_path(recipe.path)),
        ("model", recipe.model or "yours: --hf-checkpoint"),
        ("hardware", "any" if recipe.hardware is None else recipe.hardware.name),
        ("task", recipe.task),
        ("data", recipe.data),
        *_format_plan(recipe),
        ("expect", recipe.expect),
        ("tried", recipe.tried),
    ]
    if recipe.curve is not None:
        rows.append(("curve", f"{describe_path(recipe.curve)}: miles compare RUN --reference {recipe.name}"))
    width = get_terminal_width()
    lines = [
        textwrap.fill(text, width, initial_indent=key.ljust(10), subsequent_indent=" " * 10, break_on_hyphens=False)
        for key, text in rows
    ]
    return "\n".join([recipe.title, "", *lines])


def _format_plan(recipe: Recipe) -> list[tuple[str, str]]:
    """Layout and memory with the published shape; nothing for a recipe of any hardware, or of a CPU."""
    if recipe.hardware is None or not recipe.hardware.gpus_per_node:
        return []
    fit = plan_recipe(recipe)
    c, at = fit.config.cluster, fit.plan.layout
    sizes = {"tensor": at.tensor, "context": at.context, "pipeline": at.pipeline, "expert": at.expert}
    product = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    trainer = f"{at.world} GPU{'s' if at.world > 1 else ''} train" + (f" ({product})" if product else "")
    engines = ""
    if fit.plan.samples:
        where = "the same" if fit.num_gpus == at.world else f"{fit.num_gpus - at.world} others"
        engines = f"; engines of {c.rollout_num_gpus_per_engine} on {where}"
    memory = f"{format_gb(fit.training)} of a GPU while training"
    if fit.plan.samples:
        memory += f"; {format_gb(fit.sampling)} while sampling, beside a KV cache of {fit.requests} full sequences"
    memory += f"; {format_gb(fit.usable)} usable"
    if fit.host:
        memory += f"; {format_gb(fit.host)} of a node's host memory"
    problems = fit.list_problems(recipe.hardware)
    return [
        ("layout", trainer + engines),
        ("memory", memory),
        *([("does NOT fit", "; ".join(problems))] if problems else []),
    ]


def init(name: str, options: InitOptions) -> int:
    """Write a recipe and all it includes to one file; an existing one is not replaced."""
    recipe = find_recipe(name)
    file = Path(options.output or f"{recipe.path.stem}.toml")
    if file.suffix != ".toml":
        raise UsageError(f"--output {file} is not a .toml file; name one.")
    if file.exists():
        raise UsageError(f"{file} exists already; choose another name with --output.")
    header = [f"{recipe.title}. A copy of the recipe {recipe.name}, with all that it includes."]
    if recipe.model is not None:
        header += ["", f"  miles plan {file}", f"  miles train {file}"]
    file.write_text(format_standalone(recipe.layers, header), encoding="utf-8")
    print(f"{file}: {recipe.title}. Edit it, then miles plan {file}")
    return 0


# -- compare --------------------------------------------------------------------------------


def compare(runs: Sequence[Path], options: CompareOptions) -> int:
    """Hold runs to a reference curve, or write one; 0 if every run is on the curve, else 1."""
    if (options.reference is None) == (options.write_reference is None):
        raise UsageError("miles compare needs --reference RECIPE to compare with, or --write-reference FILE; give one.")
    if options.write_reference is not None:
        file = Path(options.write_reference)
        curve = build_curve(
            runs,
            options.metrics,
            recipe=file.name.partition(".")[0],
            window=options.window,
            made_with=f"miles {__version__}",
        )
        write_curve(curve, file)
        print(f"{file}: {', '.join(options.metrics)} of {len(runs)} runs, in windows of {options.window} steps.")
        return 0
    name = str(options.reference)
    curve = read_curve(_find_curve(name))
    codes = [_compare_run(run, curve, name) for run in runs]
    return max(codes)


def _find_curve(name: str) -> Path:
    if name.endswith(".json"):
        return Path(name)
    recipe = find_recipe(name)
    if recipe.curve is None:
        curves = [each.name for each in list_recipes() if each.curve is not None]
        raise UsageError(
            f"{name} has no reference curve: it was {recipe.tried}; those that have one are {', '.join(curves)}."
        )
    return recipe.curve


def _compare_run(run: Path, curve: ReferenceCurve, name: str) -> int:
    verdicts = compare_run(run, curve)
    print(f"{run} and {name} ({curve.runs} runs, windows of {curve.window} steps, {curve.made_with})\n")
    width = max(len(verdict.name) for verdict in verdicts)
    for verdict in verdicts:
        print(f"  {verdict.name.ljust(width)}  {_describe_verdict(verdict)}")
    off = [verdict.name for verdict in verdicts if not verdict.on_curve]
    missing = [metric for metric in curve.metrics if metric not in {verdict.name for verdict in verdicts}]
    print(f"\n{run} is {'NOT ' if off else ''}on the curve" + (f": {', '.join(off)}" if off else "") + ".")
    if missing:
        print(f"It has no {', '.join(missing)} to compare.")
    return 1 if off else 0


def _describe_verdict(verdict: MetricVerdict) -> str:
    low, high = verdict.band
    text = (
        f"{'ok ' if verdict.on_curve else 'OFF'} {verdict.windows - verdict.num_outside} of {verdict.windows} windows "
        f"inside, last {verdict.last:.4g} in [{low:.4g}, {high:.4g}]"
    )
    if verdict.outside is None:
        return text
    step, value, low, high = verdict.outside
    return f"{text}; first outside at step {step}: {value:.4g}, not in [{low:.4g}, {high:.4g}]"
