"""The page of the recipes: its table is generated from the recipes and their plans."""

from pathlib import Path

from miles.launch.recipes.catalog import Recipe, list_recipes
from miles.launch.recipes.fit import plan_recipe

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
BEGIN = "<!-- recipes: written by `make regenerate`, from tests/launch/recipes/test_page.py -->"
END = "<!-- end of recipes -->"
HEAD = (
    "| recipe | hardware | task | GPUs | training | sampling | sequences | host | tried |",
    "|---|---|---|--:|--:|--:|--:|--:|---|",
)


def describe(recipe: Recipe) -> str:
    """The row of a recipe."""
    link = f"[`{recipe.name}`](../recipes/{recipe.name}.toml)"
    if recipe.hardware is None or not recipe.hardware.gpus_per_node:
        place = "any" if recipe.hardware is None else recipe.hardware.name
        return f"| {link} | {place} | {recipe.task} | | | | | | {recipe.tried} |"
    fit = plan_recipe(recipe)
    sampling = [f"{fit.sampling / 1e9:.0f} GB", str(fit.requests)] if fit.plan.samples else ["", ""]
    host = f"{fit.host / 1e9:.0f} GB" if fit.host else ""
    cells = [recipe.hardware.name, recipe.task, str(fit.num_gpus), f"{fit.training / 1e9:.0f} GB", *sampling, host]
    return f"| {link} | {' | '.join(cells)} | {recipe.tried} |"


def test_the_generated_table_of_recipes_is_up_to_date(regenerate: bool):
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    table, after = rest.split(END)
    lines = "\n".join((*HEAD, *map(describe, list_recipes())))
    if regenerate:
        PAGE.write_text(f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}", encoding="utf-8")
        return
    assert table.strip() == lines, "run make regenerate"
