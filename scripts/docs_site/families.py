"""Generated pages of the model families: sizes and memory from configs, tested variants and errors, recipes, notes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from miles.launch.plan.model_requirements import ModelRequirements, estimate_requirements
from miles.launch.read_config import read_without_rules
from miles.models.accounting.known_models import load_known_models
from miles.models.families.registry import FAMILIES, match_family

ROOT = Path(__file__).parents[2]
ROUTING = (
    "Mixtures of experts: the engine records the experts of every token, and `--use-rollout-routing-replay` lets the "
    "trainer use the same ones ([parity](../parity.md#routing-replay))."
)
HYBRID = (
    "Recurrent layers keep a state that belongs to one position: a prefix is shared up to a position whose state the "
    "engine kept ([prefix cache](../engine.md#recurrent-states))."
)
IMAGES = (
    "Images: the vision tower is part of the model ([images](../vision.md), [training on "
    "images](../vision_training.md)). "
    "`--freeze-vision-tower` trains the rest alone."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyPage:
    """One page: the ``model_type`` of its families, a model to start with, and what is particular about it."""

    file: str
    title: str
    families: tuple[str, ...]
    start: str
    notes: tuple[str, ...]
    known: str = ""
    """Start of the names of published models that belong here although their architecture is another page's."""


PAGES = (
    FamilyPage(
        file="qwen",
        title="Qwen2 to Qwen3",
        families=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mimo"),
        start="Qwen/Qwen3-0.6B",
        notes=(
            "The chat template of Qwen3 has a thinking mode, which it turns on by default: "
            "`--apply-chat-template-kwargs '{\"enable_thinking\": false}'` turns it off. Leave room for the "
            "reasoning in "
            "`--rollout-max-response-len`, and watch `truncated_ratio`.",
            ROUTING,
            "`gspo` is a good start for the sizes with experts: its ratio is that of a sequence, so a token "
            "whose experts "
            "differ moves it less ([algorithms](../algorithms.md#ratio-policy_losspy)).",
            "Most figures of [performance](../performance.md) are of Qwen3-0.6B, 4B, 8B and 30B-A3B on an H200.",
        ),
    ),
    FamilyPage(
        file="qwen_hybrid",
        title="Qwen3-Next, Qwen3.5, Qwen3.6 and Qwen4-Exp",
        families=(
            *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"),
            *("qwen4_exp_text", "qwen4_exp"),
        ),
        start="Qwen/Qwen3-Next-80B-A3B-Instruct",
        notes=(
            "Three of four layers are gated delta networks: the KV cache grows with the attention layers alone, and a "
            "sequence has a state of fixed size beside it.",
            HYBRID,
            ROUTING,
            "MTP layers can be used and trained as a [draft model](../draft_models.md), but for those of Qwen4-Exp.",
            IMAGES + " This holds for Qwen3.5 and Qwen3.6; Qwen3-Next is text alone.",
            "Qwen4-Exp (Qwen3.8-Flash-Next) also has gated hyper-connections, attention whose indexer selects "
            "pools of tokens, and n-gram embeddings: a table of 51B parameters, of which each token reads 16 "
            "rows. The ids of the last tokens are part of a sequence's recurrent state. Its text model is trained "
            "alone: the tensors of the vision tower and of the MTP layer are kept as they are. The table is "
            "trained too, but not by LoRA; only tensor parallelism divides it during a step (FSDP gathers what a "
            "tensor-parallel rank has of it), so this model needs `--tensor-model-parallel-size` in training and "
            "`--rollout-num-gpus-per-engine` in the engine.",
        ),
    ),
    FamilyPage(
        file="qwen_vl",
        title="Qwen-VL",
        families=("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
        start="Qwen/Qwen2.5-VL-7B-Instruct",
        notes=(
            IMAGES,
            "`--max-patches-per-gpu` bounds the patches of a micro-batch as `--max-tokens-per-gpu` bounds its tokens.",
            "`--share-prefix` computes an image and its question once for all trajectories of a group.",
        ),
    ),
    FamilyPage(
        file="deepseek",
        title="DeepSeek",
        families=("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
        start="deepseek-ai/DeepSeek-V2-Lite-Chat",
        notes=(
            "Latent attention: the KV cache has one compressed vector per token and layer, whatever the number "
            "of heads.",
            "Published checkpoints of V3 and later are FP8 in blocks of 128 x 128: they are read as they are, and "
            "`--train-precision fp8` trains in the same format ([precision](../precision.md)).",
            "V3.2 has a sparse-attention indexer. It gets no gradient: it is loaded, published and saved unchanged. "
            "Training can replay what it selected ([parity](../parity.md#indexer-replay)).",
            "A token of V4 attends to a window of 128 tokens, and to one key for every 4 tokens (CSA), of which an "
            "indexer selects some, or for every 128 (HCA). The engine caches what a token adds to such keys for every "
            "token, so that a prefix can be shared by page; its KV cache is larger than compressed keys alone would "
            "need, and attention is computed by torch operations, without Triton kernels.",
            "The first layers of V4 look the experts of a token up in a table, which is loaded, published and saved "
            "unchanged. MTP layers are kept as they are.",
            ROUTING,
            "The router's correction bias gets no gradient either.",
        ),
    ),
    FamilyPage(
        file="kimi",
        title="Kimi and Moonlight",
        families=("kimi_k2", "kimi_k25", "kimi_linear"),
        start="moonshotai/Moonlight-16B-A3B-Instruct",
        known="Kimi",
        notes=(
            "Kimi-K2 and Moonlight are DeepSeek-V3's architecture, so what [its page](deepseek.md) says holds here.",
            "Three of four layers of Kimi-Linear are Kimi Delta Attention, the others latent attention without "
            "positions: a sequence has a state of fixed size beside a small KV cache. " + HYBRID,
            "Moonlight is the size to try a recipe with before K2.",
            IMAGES + " This holds for K2.5 and K2.6; their videos are refused. The processor needs "
            "`pip install 'miles-rl[vision]'`.",
        ),
    ),
    FamilyPage(
        file="glm",
        title="GLM",
        families=(
            "glm",
            "glm4",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "glm5_next",
            "glm4v",
            "glm46v",
            "glm4v_moe",
            "glm_ocr",
        ),
        start="zai-org/GLM-4.5-Air",
        notes=(
            "GLM-4.5 to 4.7 have attention with partial rotary positions; 4.7-Flash and GLM-5 have latent "
            "attention, GLM-5 "
            "with a sparse-attention indexer, which gets no gradient.",
            "Three of four layers of GLM-5.3-Flash are Kimi Delta Attention, the others latent attention whose indexer "
            "selects pools of tokens; the layers are joined by hyper-connections. Its text model is trained alone: "
            "the tensors of the vision tower are kept as they are. " + HYBRID,
            ROUTING,
            IMAGES + " This holds for GLM-4.1V, 4.5V and 4.6V.",
        ),
    ),
    FamilyPage(
        file="gpt_oss",
        title="gpt-oss",
        families=("gpt_oss",),
        start="openai/gpt-oss-20b",
        notes=(
            "The published checkpoints have MXFP4 experts. They are dequantized while they are read; "
            "`--train-precision mxfp4 --quantize-experts-only` keeps training and rollout in that format "
            "([precision](../precision.md)).",
            "Attention has sinks, and every other layer a window of 128 tokens.",
            ROUTING,
        ),
    ),
    FamilyPage(
        file="minimax",
        title="MiniMax-M2 and M3",
        families=("minimax_m2", "minimax_m3_vl"),
        start="MiniMaxAI/MiniMax-M2",
        notes=(
            "Sigmoid experts with a correction bias, which gets no gradient.",
            ROUTING,
            "MiniMax-M3 attends to 16 blocks of 128 tokens, which an indexer selects for each key-value head; beside "
            "keys and values a token caches one key of the indexer. The selection has no gradient, and is computed by "
            "torch, without a fused kernel.",
            "Of MiniMax-M3 the text model is read: prompts with images are refused, and an export keeps the tensors of "
            "the vision tower as they are.",
        ),
    ),
    FamilyPage(
        file="llama",
        title="Llama",
        families=("llama", "llama4_text", "llama4"),
        start="meta-llama/Llama-3.2-1B-Instruct",
        notes=(
            "Many models of others have this architecture, SmolLM2 among them: what counts is `architectures` in "
            "`config.json`.",
            "Llama 4 attends in chunks of 8,192 tokens in three of four layers, and has no positions in the others. "
            + ROUTING,
            IMAGES + " This holds for Llama 4. The processor needs `pip install 'miles-rl[vision]'`.",
        ),
    ),
    FamilyPage(
        file="gemma",
        title="Gemma",
        families=("gemma2", "gemma3_text", "gemma3", "gemma3n_text", "gemma3n", "gemma4_text", "gemma4"),
        start="google/gemma-3-1b-it",
        notes=(
            "Windows in most layers keep the KV cache small.",
            "In Gemma 3 and 4 the tokens of an image attend to each other in both directions.",
            "Of Gemma 3n the text model is read: prompts with images or audio are refused, and an export keeps the "
            "tensors of both towers as they are. A layer has four residual streams (AltUp), which torch mixes without "
            "a fused kernel.",
            "`--parity exact` is refused for the layers of Gemma 4 without a window, whose heads have 512 channels, "
            "and for Gemma 3n, whose streams are mixed by operations that are not batch-invariant.",
            IMAGES,
        ),
    ),
    FamilyPage(
        file="mistral",
        title="Mistral, Mixtral, Ministral, Pixtral",
        families=("mistral", "ministral", "ministral3", "mistral3", "mistral4", "llava", "mixtral"),
        start="mistralai/Mistral-7B-Instruct-v0.3",
        notes=(ROUTING, IMAGES + " This holds for Mistral Small 3.1 and 3.2, Ministral 3 and Pixtral."),
    ),
    FamilyPage(
        file="phi",
        title="Phi",
        families=("phi3",),
        start="microsoft/Phi-4-mini-instruct",
        notes=(
            "`longrope` has short and long factors, and a run uses one set throughout: the long ones, unless "
            "`--rollout-max-context-len` is within the model's original context length "
            "([models](../models.md#what-is-read)).",
        ),
    ),
    FamilyPage(
        file="nemotron",
        title="Nemotron",
        families=("nemotron_h",),
        start="nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        notes=(
            "Mamba-2 layers, few attention layers without positions, and in Nemotron-3 experts.",
            HYBRID,
            ROUTING,
        ),
    ),
    FamilyPage(
        file="smollm",
        title="SmolLM and SmolVLM",
        families=("smollm3", "smolvlm", "idefics3"),
        start="HuggingFaceTB/SmolLM2-135M-Instruct",
        known="SmolLM",
        notes=(
            "SmolLM2 is Llama's architecture. The [first run](../first_run.md#a-real-small-model) trains "
            "SmolLM2-135M-Instruct on sums, with the curve of that run.",
            IMAGES
            + " This holds for SmolVLM, SmolVLM2 and Idefics3; the processor needs `pip install 'miles-rl[vision]'`.",
        ),
    ),
    FamilyPage(
        file="inkling",
        title="Inkling",
        families=("inkling_text", "inkling_mm_model"),
        start="thinkingmachines/Inkling-Small",
        notes=(
            "The text model is trained alone: tensors of the image and audio towers and of the MTP layers are kept as "
            "they are, and the NVFP4 checkpoints are not read. `inkling_text` is the text model as transformers saves "
            "it by itself.",
            "Five of six layers attend to a window of 512 tokens. There is no RoPE: every head of a token mixes "
            "learned profiles over distances into a bias of its scores. Torch operations compute attention, slice by "
            "slice, and the backward pass recomputes the scores; FlashAttention and the Triton kernels take no such "
            "bias and are not used, so steps are slower than those of a model with RoPE and run without CUDA graphs.",
            "Short convolutions of keys and values, and of the outputs of attention and MLP, are computed in float32, "
            "with weights in the model's dtype. A sequence keeps their last inputs beside its KV cache. " + HYBRID,
            "The router weighs two shared experts together with the selected ones; only the selected ones are recorded "
            "and replayed. LoRA adapts the routed experts, not the shared ones, which also stay wide where experts are "
            "quantized.",
            ROUTING,
            "Refused in a sentence: sequence parallelism, sharing a prefix in training, "
            "and `--train-backend megatron`. Tensor, expert and FSDP parallelism work.",
            "The sizes are those of the text model, from the published keys of the configs. The announced 975B and "
            "276B are what they would be if the first two layers had experts.",
            "transformers 5.17 normalizes the embedding twice in `InklingForConditionalGeneration` and once in "
            "`InklingForCausalLM`; here it is done once, as SGLang does.",
        ),
    ),
    FamilyPage(
        file="step",
        title="Step",
        families=("step3p5", "step3p7"),
        start="stepfun-ai/Step-3.5-Flash",
        notes=(
            "One layer in four has full attention, the others a window of 512 tokens and more heads; each head has a "
            "gate. The gates and ups of some layers are limited, as the config says layer by layer.",
            "The text model of Step-3.7 is trained alone: the tensors of the vision tower and of the MTP layers are "
            "kept as they are.",
            ROUTING,
            "The router's correction bias gets no gradient.",
        ),
    ),
    FamilyPage(
        file="ernie",
        title="ERNIE 4.5",
        families=("ernie4_5", "ernie4_5_moe"),
        start="baidu/ERNIE-4.5-0.3B-PT",
        notes=(ROUTING,),
    ),
    FamilyPage(
        file="hunyuan",
        title="Hunyuan",
        families=("hunyuan_v1_dense", "hunyuan_v1_moe"),
        start="tencent/Hunyuan-0.5B-Instruct",
        notes=(ROUTING,),
    ),
    FamilyPage(
        file="lfm",
        title="LFM2",
        families=("lfm2", "lfm2_moe"),
        start="LiquidAI/LFM2-350M",
        notes=(
            "Most layers are gated short convolutions, which keep the last inputs of a sequence and no KV cache.",
            HYBRID,
            ROUTING,
        ),
    ),
    FamilyPage(
        file="internvl",
        title="InternVL",
        families=("internvl",),
        start="OpenGVLab/InternVL3-1B-hf",
        notes=(IMAGES, "The checkpoints whose names end in `-HF` are those of this architecture."),
    ),
)


def family_pages() -> Mapping[str, str]:
    """The pages by their path below docs/."""
    return {f"families/{page.file}.md": format_page(page) for page in PAGES}


def find_page(name: str, family: str) -> FamilyPage:
    """The page of a published model."""
    named = next((page for page in PAGES if page.known and name.startswith(page.known)), None)
    return named or next(page for page in PAGES if family in page.families)


def list_known(page: FamilyPage) -> list[str]:
    """Published models of a page whose shapes are known."""
    found = [(name, match_family(config)) for name, config in load_known_models().items()]
    return [name for name, family in found if family is not None and find_page(name, family.model_type) is page]


# -- tables ---------------------------------------------------------------------------------


def format_gpus(counts: Mapping[int, int]) -> str:
    """The fewest GPUs of each memory size, up to the first that needs one alone; above 256 a size is left out."""
    single = next((size for size, count in counts.items() if count == 1), max(counts))
    shown = [(size, count) for size, count in counts.items() if size <= single and 0 < count <= 256]
    return ", ".join(f"{count} x {size} GB" for size, count in shown) or "more than 256 GPUs"


def format_size(need: ModelRequirements) -> str:
    """A row of the table of sizes."""
    active = f", {need.active_parameters / 1e9:.1f}B active" if need.active_parameters < 0.9 * need.parameters else ""
    gib = 2**30
    cells = [
        need.name,
        f"{need.parameters / 1e9:.2f}B{active}",
        f"{need.weights / gib:,.1f} GiB",
        f"{need.kv_per_token / 2**10:,.0f} KiB",
        format_gpus(need.gpus_to_sample),
        format_gpus(need.gpus_to_train_checkpointed),
    ]
    return "| " + " | ".join(cells) + " |"


def size_table(page: FamilyPage) -> Iterator[str]:
    config = read_without_rules(["--gradient-checkpointing"])
    needs = sorted((estimate_requirements(name, config) for name in list_known(page)), key=lambda need: need.parameters)
    if not needs:
        return
    yield from ("## Sizes", "")
    yield (
        "What `miles plan MODEL` computes from the published config: weights in bfloat16, the KV cache of a "
        "token, and the "
        "fewest GPUs of a memory size that hold the engine, or the trainer with Adam in float32, "
        "`--gradient-checkpointing` and 16,384 tokens at once, sharded over all of them."
    )
    yield from (
        "",
        "| model | parameters | weights | KV per token | to sample | to train |",
        "|---|---|--:|--:|---|---|",
    )
    yield from (format_size(need) for need in needs)
    yield from ("", "The sizes are equal to those of:", "")
    yield from (f"- {need.name}: {need.source}." for need in needs)
    yield from ("", "Adapters, 8-bit optimizer state and FP8 need less: add their flags to `miles plan`.", "")


def coverage_rows() -> Mapping[str, list[str]]:
    """The rows of the tables of docs/models.md, by the architecture or family in the first cell."""
    rows: dict[str, list[str]] = {}
    for line in (ROOT / "docs" / "models.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and line.count("|") > 4:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            for name in re.findall(r"\w+", cells[0]):
                rows.setdefault(name, []).append(line)
    return rows


def architecture_table(page: FamilyPage, rows: Mapping[str, list[str]]) -> Iterator[str]:
    yield from ("## Architectures", "", "| `architectures` | models | made of | images | prefix cache | routing |")
    yield "|---|---|---|---|---|---|"
    names = [name for family in FAMILIES if family.model_type in page.families for name in family.architectures]
    yield from dict.fromkeys(line for name in names for line in rows[name])
    yield ""


def error_tables(page: FamilyPage, rows: Mapping[str, list[str]]) -> Iterator[str]:
    lines = [line for family in page.families for line in rows.get(family, [])]
    text = [line for line in lines if line.count("|") == 7]
    vision = [line for line in lines if line.count("|") == 6]
    yield from ("## What is tested", "")
    yield (
        "Against `transformers` in float32, on small models with random weights: the largest relative difference "
        "of logits "
        "and gradients over all variants, the largest difference of the log-probs of sampled tokens, and whether "
        "a saved "
        "checkpoint is the same to the bit ([models](../models.md#checked-against-transformers))."
    )
    yield ""
    if text:
        yield from (
            "| family | variants | logits | gradients | sampled | saved |",
            "|---|---|--:|--:|--:|---|",
            *text,
            "",
        )
    if vision:
        yield from ("| with a vision tower | features | logits | gradients | saved |", "|---|--:|--:|--:|---|", *vision)
        yield ""


def list_recipes(page: FamilyPage) -> Iterator[str]:
    """Recipes that name a model of this page."""
    known = {name.lower(): name for name in list_known(page)}
    for file in sorted((ROOT / "recipes").rglob("*.toml")):
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        tables = [values, *(value for value in values.values() if isinstance(value, dict))]
        model = next((str(table["hf_checkpoint"]) for table in tables if "hf_checkpoint" in table), "")
        if model.rpartition("/")[2].lower() in known:
            yield f"- [{file.relative_to(ROOT)}](../../{file.relative_to(ROOT)}): {model}"


def format_page(page: FamilyPage) -> str:
    """The page of a family."""
    models = "; ".join(dict.fromkeys(family.models for family in FAMILIES if family.model_type in page.families))
    lines = [f"# {page.title}", "", f"{models}. This page is generated (`make regenerate`).", "", "## Start", ""]
    lines += [
        "```bash",
        f"miles doctor {page.start}    # does it fit here, is it read",
        f"miles parity {page.start}    # engine, trainer and transformers on the same tokens",
        f"miles plan recipes/grpo_small.toml --hf-checkpoint {page.start} --prompt-data train.jsonl --save runs/first",
        "```",
        "",
        "The last line prints memory, placement and objective; with `train` for `plan` it starts. Sizes that "
        "need several "
        "GPUs take the flags of [eight GPUs](../quick_start/eight_gpus.md) and [parallelism](../parallelism.md).",
        "",
    ]
    recipes = list(list_recipes(page))
    lines += ["Recipes of these models:", "", *recipes, ""] if recipes else []
    lines += ["## Notes", "", *(f"- {note}" for note in page.notes), ""]
    lines += size_table(page)
    rows = coverage_rows()
    lines += [*architecture_table(page, rows), *error_tables(page, rows)]
    return "\n".join(lines).rstrip() + "\n"
