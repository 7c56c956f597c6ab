"""The tables of families in docs/models.md: which there are, of what they are made, and how exact each was measured.

``make regenerate`` measures the errors of rows that are new or have other variants; ``ARGS=--remeasure`` those of all
families, which takes minutes. That every kind stays within its bounds is what ``test_decoder``, ``test_hub`` and the
engine's ``test_oracle`` assert at every run.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.backends.native.test_oracle import KNOBS, REQUESTS, logits_of_each, whole
from tests.models.oracle import (
    KINDS,
    SMALL,
    assemble,
    gradients,
    hf_logits,
    hf_model,
    our_logits,
    relative,
    tokens_of,
    twin,
)
from tests.models.vision.small_vision import (
    VISION_KINDS,
    VISION_VARIANTS,
    compare_features,
    hf_vision_logits,
    our_vision_logits,
    prompts_of,
    vision_config,
    vision_model,
    vision_twin,
)
from tests.models.vision.small_vision import assemble as assemble_vision

from miles.backends.megatron.supported_models import check_megatron_support
from miles.cluster.parallel_dims import ParallelDims
from miles.kernels.activation_kinds import is_limited
from miles.models.capabilities import check_batch_invariance
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.models.families.registry import FAMILIES
from miles.models.residual_spec import GatedResidualSpec
from miles.models.spec import (
    AttentionSpec,
    BlockIndexerSpec,
    CompressedAttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    PoolIndexerSpec,
    RelativeAttentionSpec,
    ShortConvSpec,
)

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- coverage: written by `make regenerate`, from tests/models/test_coverage.py -->\n"
END = "<!-- end of coverage -->"
RAGGED = (7, 1, 30, 3, 12, 12, 90)
# Families that are another one under another name: the text model inside a model of pictures, for one.
SAME = {
    "gemma3n": "gemma3n_text",
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "step3p5": "step3p7",
}
RECURRENT = {
    GatedDeltaNetSpec: "gated delta network",
    KimiDeltaSpec: "Kimi delta attention",
    MambaSpec: "Mamba-2",
    ShortConvSpec: "short convolution",
}
ERROR = re.compile(r"\b\de-\d\d\b")
FAMILY_HEAD = ("| `architectures` | models | made of | images | prefix cache | routing |", "|---|---|---|---|---|---|")
ERROR_HEAD = ("| family | variants tested | logits | gradients | sampled | saved |", "|---|---|--:|--:|--:|---|")
VISION_HEAD = ("| family with a vision tower | features | logits | gradients | saved |", "|---|--:|--:|--:|---|")
SUPPORT_HEAD = ("| family | `--parity exact` | context parallel | `--train-backend megatron` |", "|---|---|---|---|")
LEGEND = """
The second table is what the rules accept; a family with both `--parity exact` and `--train-backend megatron` has them
together. [parity.md](parity.md#exact), [parallelism.md](parallelism.md) and [megatron.md](megatron.md) say which
families their tests run.

The others are measured against `transformers` in float32, the worst of all variants: the largest difference of logits
on a ragged batch and of any parameter's gradient, both relative; the largest difference of the log-probs of tokens that
the engine sampled from a paged cache. `saved` compares every tensor of an exported checkpoint, which transformers loads
again. Families with a vision tower are measured on prompts with several images of different sizes, and videos where the
family takes them: the features of the tower, the logits, and the gradients of tower and decoder.
"""


def specs() -> dict[str, list[tuple[str, DecoderSpec]]]:
    """The kinds of every family, with their specs."""
    found: dict[str, list[tuple[str, DecoderSpec]]] = {family.model_type: [] for family in FAMILIES}
    for name, kind in KINDS.items():
        config = kind.config(**(SMALL | kind.own)).to_dict() | {"architectures": [kind.model.__name__]}
        spec = spec_from_config(config)
        found[spec.family].append((name, spec))
    for name, kind in VISION_KINDS.items():
        config = vision_config(name).to_dict() | {"architectures": [kind.model.__name__]}
        found[name] = [(name, spec_from_config(config))]
    return found


def mixer_made_of(mixer: Mixer | None) -> Iterator[str]:
    if isinstance(mixer, AttentionSpec):
        yield "attention"
        named = {
            "window": mixer.window,
            "chunks": mixer.chunk,
            "sinks": mixer.sinks,
            "soft-cap": mixer.softcap,
            "output gate": mixer.gated,
            "gate of each head": mixer.head_gate,
            "q-k norm": mixer.qk_norm != "none",
            "indexer of pools": isinstance(mixer.indexer, PoolIndexerSpec),
            "indexer of blocks": isinstance(mixer.indexer, BlockIndexerSpec),
            "no positions": mixer.rope is None,
            "partial rotary": mixer.rope is not None and mixer.rope.dim not in (None, mixer.head_dim),
        }
        yield from (name for name, there in named.items() if there)
        if mixer.rope is not None and mixer.rope.kind != "default":
            yield mixer.rope.kind
    elif isinstance(mixer, MlaSpec):
        yield "latent attention"
        if mixer.indexer is not None:
            yield "indexer" if mixer.indexer.pool == 1 else "indexer of pools"
        kind = "no positions" if mixer.rope is None else mixer.rope.kind
        yield from (kind,) if kind != "default" else ()
    elif isinstance(mixer, RelativeAttentionSpec):
        yield from ("attention", "relative position bias", "q-k norm", "short convolution")
        yield from ("window",) if mixer.window is not None else ()
    elif isinstance(mixer, CompressedAttentionSpec):
        yield from ("attention", "window", "sinks", "keys that are values", "output in groups", "partial rotary")
        own = mixer.compressor
        if own is not None:
            yield "compressed keys (CSA)" if own.overlap else "compressed keys (HCA)"
            yield from ("indexer of compressed keys",) if own.indexer is not None else ()
        yield from (mixer.rope.kind,) if mixer.rope.kind != "default" else ()
    elif mixer is not None:
        yield RECURRENT[type(mixer)]


def made_of(layer: LayerSpec) -> Iterator[str]:
    ffn = layer.ffn
    yield from mixer_made_of(layer.mixer)
    if isinstance(ffn, MoeSpec):
        yield f"{ffn.score} experts"
        named = {"expert groups": ffn.groups > 1, "correction bias": ffn.correction, "shared expert": ffn.shared}
        clamped = ffn.activation == "swiglu_clamped" or is_limited(ffn.activation)
        named |= {"latent experts": ffn.latent, "clamped gate": clamped, "hash routing": ffn.hash_vocab}
        named |= {"weighed shared experts": ffn.weighed_shared}
        yield from (name for name, there in named.items() if there)
    elif isinstance(ffn, MlpSpec) and not ffn.gated:
        yield "plain MLP"
    if isinstance(ffn, MlpSpec) and ffn.sparsity:
        yield "sparse activations"
    if layer.post_norms:
        yield "norms on both sides"
    if layer.hyper is not None:
        yield "gated hyper-connections" if isinstance(layer.hyper, GatedResidualSpec) else "hyper-connections"
    if layer.ngram is not None:
        yield "n-gram embeddings"
    if layer.altup is not None:
        yield from ("residual streams (AltUp)", "learned residual (LAuReL)", "per-layer inputs")


def tower_of(spec: DecoderSpec) -> Iterator[str]:
    """What a vision tower is made of."""
    assert spec.vision is not None
    tower = spec.vision.tower
    yield "any size" if tower.positions is None or tower.positions.kind != "fixed" else "tiles of one size"
    named = {
        "videos": spec.vision.video_token_id is not None,
        "windows": tower.window is not None,
        "2-D rotary": tower.rope_theta is not None,
        "learned positions": tower.positions is not None,
        "class token": tower.class_token is not None,
        "deepstack": tower.deepstack_layers,
        "multimodal rotary positions": spec.vision.positions == "mrope",
        "attention in both directions": spec.vision.bidirectional_spans,
    }
    yield from (name for name, there in named.items() if there)


def family_row(family, kinds) -> str:
    parts = dict.fromkeys(part for _, spec in kinds for layer in spec.layers for part in made_of(layer))
    words = [*parts, *(["soft-capped logits"] if any(spec.logit_softcap for _, spec in kinds) else [])]
    named = ", ".join(f"`{name}`" for name in family.architectures)
    cache = "by states" if any(spec.recurrent for _, spec in kinds) else "yes"
    routing = "recorded, replayed" if any(spec.moe for _, spec in kinds) else "-"
    vision = next((", ".join(tower_of(spec)) for _, spec in kinds if spec.vision is not None), "-")
    return f"| {named} | {family.models} | {', '.join(words)} | {vision} | {cache} | {routing} |"


def support_row(family, kinds) -> str:
    """Whether the rules accept a family, or why not: all of its variants, or the first that they refuse."""
    specs = [spec for _, spec in kinds]
    exact = [check_batch_invariance(spec) for spec in specs]
    split = [ParallelDims(world=2, context=2).find_model_problem(spec) for spec in specs]
    megatron = [check_megatron_support(spec, ParallelDims()) for spec in specs]
    return f"| {family.model_type} | {' | '.join(map(explain, (exact, split, megatron)))} |"


def explain(problems: Sequence[str | None]) -> str:
    """The first reason in sentences that refuse a model, without the number of the layer."""
    refused = [each for each in problems if each is not None]
    if not refused:
        return "yes"
    reason = refused[0].removesuffix(".").split("; ")[0].split(": ")[-1]
    reason = re.sub(r"^layer [0-9]+ ", "a layer ", reason)
    return f"no: {reason}" if len(refused) == len(problems) else f"yes, unless {reason}"


def errors(kind: str, folder: Path) -> tuple[float, float, float]:
    """Logits, gradients and sampled log-probs against transformers; asserts that what is saved is equal to the bit."""
    model = hf_model(kind)
    decoder = twin(model)
    sequences = tokens_of(RAGGED)
    theirs, ours = hf_logits(model, sequences), our_logits(decoder, sequences)
    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    (theirs.log_softmax(-1) * weights).sum().backward()
    (ours.log_softmax(-1) * weights).sum().backward()
    slopes = assemble(decoder.spec, gradients(model))
    steep = max(relative(p.grad, slopes[name]) for name, p in decoder.named_parameters() if p.requires_grad)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder / "theirs")
    hf.export(hf.load(folder / "theirs", device="cpu"), folder / "ours", like=folder / "theirs")
    again = type(model).from_pretrained(folder / "ours").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    return relative(ours.detach(), theirs.detach()), steep, sampled(model, decoder)


def sampled(model, decoder) -> float:
    tiny = Tiny()
    answers = tiny.generate_all(tiny.engine(decoder, **KNOBS), REQUESTS)
    finished, off = whole(tiny, REQUESTS, answers), 0.0
    for i, logits in logits_of_each(model, finished):
        start = len(REQUESTS[i][0])
        expected = logits[start - 1 : -1].log_softmax(-1).gather(1, finished[i][start:, None]).squeeze(1)
        off = max(off, float(np.abs(tiny.logprobs(answers[i]) - expected.numpy()).max()))
    return off


def error_row(family, kinds, folder: Path | None, stated: Sequence[str]) -> str:
    """The row as ``stated`` has it, or measured; without a folder to measure in, new errors are zero."""
    title = f"| {family.model_type} | {'; '.join(name for name, _ in kinds)} | "
    if (row := find_row(stated, title)) is not None:
        return row
    worst = (0.0, 0.0, 0.0) if folder is None else np.max([errors(name, folder / name) for name, _ in kinds], axis=0)
    return f"{title}{' | '.join(f'{error:.0e}' for error in worst)} | to the bit |"


def find_row(stated: Sequence[str], title: str) -> str | None:
    return next((row for row in stated if row.startswith(title)), None)


def vision_errors(kind: str, folder: Path) -> tuple[float, float, float]:
    """Features, logits and gradients against transformers; asserts that what is saved is equal to the bit."""
    model, prompts = vision_model(kind), prompts_of(kind)
    decoder = vision_twin(model)
    with torch.no_grad():
        features = max(relative(ours, theirs) for ours, theirs in compare_features(model, decoder, prompts))
    theirs, ours = hf_vision_logits(model, prompts), our_vision_logits(decoder, prompts)
    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1))
    for logits in (theirs, ours):
        (logits.log_softmax(-1) * weights).sum().backward()
    slopes = assemble_vision(decoder.spec, gradients(model))
    steep = max(relative(p.grad, slopes[name]) for name, p in decoder.named_parameters() if p.requires_grad)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    hf.export(decoder, folder / "ours", config=config)
    again = type(model).from_pretrained(folder / "ours").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    return features, relative(ours.detach(), theirs.detach()), steep


def vision_row(kind: str, folder: Path | None, stated: Sequence[str]) -> str:
    """The worst of a kind and its variants, as ``stated`` has it or measured."""
    rows = [row for row in stated if row.count("|") == VISION_HEAD[0].count("|")]
    if (row := find_row(rows, f"| {kind} | ")) is not None:
        return row
    kinds = [kind, *(name for name in VISION_VARIANTS if name.startswith(f"{kind}_"))]
    worst = (0.0, 0.0, 0.0) if folder is None else np.max([vision_errors(k, folder / k) for k in kinds], axis=0)
    return f"| {kind} | {' | '.join(f'{error:.0e}' for error in worst)} | to the bit |"


def test_the_generated_table_of_families_is_up_to_date(
    regenerate: bool, request: pytest.FixtureRequest, tmp_path: Path
):
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    table, after = rest.split(END)
    found = specs()
    every = [(family, found[SAME.get(family.model_type, family.model_type)]) for family in FAMILIES]
    assert not [family.model_type for family, kinds in every if not kinds], (
        "a family has no kind in tests/models/small_families"
    )
    own = [each for each in every if each[0].model_type not in (*SAME, *VISION_KINDS)]
    folder = tmp_path if regenerate else None
    stated = table.splitlines() if regenerate and not request.config.getoption("--remeasure") else ()
    rows = [error_row(family, kinds, folder, stated) for family, kinds in own]
    seen = [vision_row(kind, folder, stated) for kind in VISION_KINDS]
    families = [family_row(*each) for each in every]
    support = [support_row(*each) for each in every]
    lines = "\n".join(
        (*FAMILY_HEAD, *families, "", *SUPPORT_HEAD, *support, "", *ERROR_HEAD, *rows, "", *VISION_HEAD, *seen, LEGEND)
    )
    if regenerate:
        PAGE.write_text(f"{before}{BEGIN}\n{lines}\n{END}{after}", encoding="utf-8")
        return
    assert ERROR.sub("#", table.strip()) == lines.replace("0e+00", "#").strip(), "run make generated"


def test_no_stated_error_is_beyond_its_bound():
    stated = [[float(error) for error in ERROR.findall(line)] for line in PAGE.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in stated if len(row) == 3]
    assert len(rows) == len(FAMILIES) - len(SAME)
    for first, slopes, last in rows:  # of a vision tower, gradients come last
        assert first <= 1e-4 and slopes <= 1e-3 and last <= 1e-3
