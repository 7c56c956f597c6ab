"""Indexer replay in training: tokens attend to what the engine's indexers selected, whatever the trainer's would."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.models.oracle import hf_model, twin
from tests.train.small_trainer import distance, step, weights, worker

from miles.backends.fsdp.local_model import LocalModel
from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.core.errors import MilesError
from miles.core.protocols import SamplingParams
from miles.core.token_fields import INDEXER_TOPK
from miles.core.types import Sample, Version
from miles.kernels.attention.topk_positions import select_topk
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.batch_invariant.attention_metadata import Selection
from miles.kernels.batch_invariant.packed_attention import BatchInvariantVarlenBackend
from miles.kernels.numerics import BATCH_INVARIANT
from miles.models.decoder import Decoder
from miles.models.indexer_layout import build_indexer_layout
from miles.sync.manifest import build_manifest
from miles.train.indexer_replay import build_selections

SPARSE = ("deepseek v3.2", "minimax-m3", "hybrid glm 5.3 flash", "hybrid qwen4")
REPLAY = {"use_rollout_indexer_replay": True}


def decoder_of(kind, dtype=torch.float32, numerics=None):
    decoder = twin(hf_model(kind, max_position_embeddings=256), dtype)
    return decoder if numerics is None else with_numerics(decoder, numerics)


def with_numerics(decoder, numerics):
    like = decoder.embedding.weight
    other = Decoder(decoder.spec, device=like.device, dtype=like.dtype, numerics=numerics)
    other.load_state_dict(decoder.state_dict())
    return other


def perturbed(decoder, scale=0.05):
    """The same model after some training: other hidden states, so that indexers select other tokens."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (p for p in decoder.parameters() if p.is_floating_point()):
            parameter.add_(scale * torch.randn_like(parameter))
    return decoder


def sample_from_engine(decoder, count=2, prompt=22, new=8):
    """Samples of one prompt each, as a run makes them of an engine's completions."""
    config = NativeConfig(engine_page_size=4, engine_max_running=4)
    engine = NativeEngine(
        decoder.spec,
        device="cpu",
        dtype=decoder.embedding.weight.dtype,
        config=config,
        run=InlineExecutor(),
        decode=None,
        numerics=decoder.numerics,
        return_indexer_topk=True,
    )
    tensors = {name: p.detach() for name, p in decoder.named_parameters()}
    engine.begin(build_manifest(Version(), tensors))
    for name, tensor in tensors.items():
        engine.receive(name, tensor)
    engine.verify()
    engine.commit()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, decoder.spec.vocab_size - 1, prompt + i).astype(np.int32) for i in range(count)]

    async def generate():
        how = [SamplingParams(max_new_tokens=new, seed=i, ignore_eos=True) for i in range(count)]
        return await asyncio.gather(*(engine.generate(p, h) for p, h in zip(prompts, how, strict=True)))

    found = asyncio.run(generate())
    return [build_sample(i, p, c) for i, (p, c) in enumerate(zip(prompts, found, strict=True))]


def build_sample(number, prompt, completion):
    spans = completion.spans
    mask = np.arange(len(prompt) + sum(map(len, spans))) >= len(prompt)
    records = np.concatenate([completion.prompt_extras[INDEXER_TOPK], *(s.extras[INDEXER_TOPK] for s in spans)])
    return Sample(
        prompt_id=number,
        trajectory=0,
        tokens=np.concatenate([prompt, *(s.tokens for s in spans)]),
        mask=mask,
        logprobs=np.concatenate([np.zeros(len(prompt), np.float32), *(s.logprobs for s in spans)]),
        advantages=mask.astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        samples_per_trajectory=1,
        extras={INDEXER_TOPK: records},
    )


class Listening(LocalModel):
    """Keeps what every sparse layer of every forward selects: {layer: [selected of each sequence]}."""

    def __init__(self, decoder, **how):
        super().__init__(decoder, **how)
        self.heard: list[dict[int, object]] = []

    def read(self, *given, **more):
        decoder, backends = self._decoder, []

        def listen(tokens_T, positions_T, backend, *rest, **options):
            backends.append(backend)
            return type(decoder).forward(decoder, tokens_T, positions_T, backend, *rest, **options)

        decoder.forward = listen
        try:
            return super().read(*given, **more)
        finally:
            del decoder.forward
            self.heard += [dict(backend._selections) for backend in backends]


def tokens_seen(spec, layer, selection, sequence, query):
    """The tokens that a query attends to in each group of a layer: sets."""
    mixer = spec.layers[layer].mixer
    if isinstance(selection, Selection):  # of batch-invariant attention
        units = [each.nonzero()[:, 0].tolist() for each in selection.units_TXU[query]]
        size = selection.size
        return [{t for u in each for t in range(u * size, (u + 1) * size) if t <= query} for each in units]
    selected = selection.selected[sequence]
    if selection.block is None:
        return [{t for t in selected[query].tolist() if t <= query}]
    block = mixer.indexer.block
    return [
        {t for b in each[query].tolist() for t in range(b * block, (b + 1) * block) if t <= query} for each in selected
    ]


def tokens_recorded(spec, layer, row, query):
    """The same of an engine's record."""
    indexer = spec.layers[layer].mixer.indexer
    size = getattr(indexer, "block", None) or indexer.pool
    groups = row.reshape(-1, indexer.top if hasattr(indexer, "block") else indexer.top // size).tolist()
    seen = [{t for unit in group for t in range(unit * size, (unit + 1) * size) if t <= query} for group in groups]
    if not hasattr(indexer, "block"):
        seen = [each | set(range((query + 1) // size * size, query + 1)) for each in seen]
    return seen


def count_differences(spec, samples, heard, order):
    """How many recorded rows differ from what a forward over the samples, in this order, selected; how many agree."""
    layout, differ, agree = build_indexer_layout(spec), 0, 0
    for sequence, number in enumerate(order):
        records = samples[number].extras[INDEXER_TOPK]
        for slot, layer in enumerate(layout.layers):
            rows = records[: len(samples[number]) - 1, slot]
            for query in np.flatnonzero((rows != np.iinfo(rows.dtype).max).all(1)).tolist():
                seen = tokens_seen(spec, layer, heard[layer], sequence, query)
                same = seen == tokens_recorded(spec, layer, rows[query], query)
                differ, agree = differ + (not same), agree + same
    return differ, agree


def one_step(decoder, samples, algo, **how):
    actor = Listening(decoder, **how)
    trainer = worker(actor, algo=algo, train={"lr": 0.0})
    metrics = step(trainer, samples).metrics
    return actor, metrics


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("change", ["weights", "dtype"])
def test_the_trainer_attends_to_what_the_engine_selected_where_weights_or_dtype_differ(kind, change):
    samples = sample_from_engine(decoder_of(kind, torch.bfloat16 if change == "dtype" else torch.float32))

    def trained():
        return perturbed(decoder_of(kind)) if change == "weights" else decoder_of(kind)

    plain, without = one_step(trained(), samples, {})
    held, metrics = one_step(trained(), samples, REPLAY)
    spec, order = plain.spec, range(len(samples))
    for heard in held.heard:
        differ, agree = count_differences(spec, samples, heard, order)
        assert differ == 0 and agree > 20
    differ, agree = count_differences(spec, samples, plain.heard[0], order)
    assert differ > 0, "without replay, the trainer's own indexers select other tokens"
    assert metrics["indexer_mismatch_ratio"] > 0 and "indexer_mismatch_ratio" not in without


def test_equal_models_select_alike_and_replay_changes_no_log_prob():
    samples = sample_from_engine(decoder_of("deepseek v3.2"))
    plain, without = one_step(decoder_of("deepseek v3.2"), samples, {})
    _, metrics = one_step(decoder_of("deepseek v3.2"), samples, REPLAY)
    assert metrics["indexer_mismatch_ratio"] == 0
    assert metrics["parity_mean_abs"] == without["parity_mean_abs"] < 1e-4
    assert count_differences(plain.spec, samples, plain.heard[0], range(len(samples)))[0] == 0


def test_batch_invariant_attention_replays_too():
    (sample,) = sample_from_engine(decoder_of("deepseek v3.2", numerics=BATCH_INVARIANT), count=1)
    # Of another version: of the trainer's own, log-probs would have to be equal.
    samples = [replace(sample, versions=np.where(sample.mask, 3, -1).astype(np.int32))]
    trained = perturbed(decoder_of("deepseek v3.2", numerics=BATCH_INVARIANT))
    plain, _ = one_step(trained, samples, {})
    held, metrics = one_step(trained, samples, REPLAY)
    assert count_differences(trained.spec, samples, plain.heard[0], [0])[0] > 0
    assert count_differences(trained.spec, samples, held.heard[-1], [0])[0] == 0
    assert metrics["indexer_mismatch_ratio"] > 0


def test_layers_that_run_again_in_backward_attend_to_the_same_tokens():
    samples, results = sample_from_engine(decoder_of("deepseek v3.2")), []
    for again in (False, True):
        actor = LocalModel(perturbed(decoder_of("deepseek v3.2")), gradient_checkpointing=again)
        trainer = worker(actor, algo=REPLAY, train={"lr": 0.1})
        results.append((step(trainer, samples).metrics, weights(trainer)))
    assert distance(results[0][1], results[1][1]) < 1e-5
    assert results[0][0]["indexer_mismatch_ratio"] == results[1][0]["indexer_mismatch_ratio"] > 0


def test_the_reference_selects_its_own_tokens():
    samples = sample_from_engine(decoder_of("deepseek v3.2"))
    algo = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    found = []
    for more in ({}, REPLAY):
        reference = Listening(perturbed(decoder_of("deepseek v3.2")), frozen=True)
        step(worker(LocalModel(decoder_of("deepseek v3.2")), algo=algo | more, reference=reference), samples)
        found.append(count_differences(reference.spec, samples, reference.heard[0], range(len(samples))))
    assert found[0] == found[1] and found[0][0] > 0


def test_a_sample_without_records_leaves_the_choice_to_the_indexer():
    first, second = sample_from_engine(decoder_of("deepseek v3.2"))
    trained = perturbed(decoder_of("deepseek v3.2"))
    held, metrics = one_step(trained, (replace(first, extras={}), second), REPLAY)
    assert count_differences(trained.spec, (first, second), held.heard[-1], range(2))[0] > 0
    assert metrics["indexer_mismatch_ratio"] > 0
    _, none = one_step(trained, (replace(first, extras={}), replace(second, extras={})), REPLAY)
    assert "indexer_mismatch_ratio" not in none


def damage_order(rows):
    rows[-3] = rows[-3, :, ::-1]


def damage_future(rows):
    rows[-3, :, -1] = len(rows)


def damage_early(rows):
    rows[2] = np.arange(rows.shape[-1])


def damage_part(rows):
    rows[-3, :, -1] = np.iinfo(rows.dtype).max


@pytest.mark.parametrize("damage", [damage_order, damage_future, damage_early, damage_part])
def test_records_that_cannot_be_selections_are_refused(damage):
    first, *_ = sample_from_engine(decoder_of("deepseek v3.2"), count=1)
    rows = first.extras[INDEXER_TOPK].copy()
    damage(rows)
    with pytest.raises(MilesError, match="not ascending positions before the token"):
        one_step(decoder_of("deepseek v3.2"), (replace(first, extras={INDEXER_TOPK: rows}),), REPLAY)


def test_records_of_another_model_or_dtype_are_refused():
    first, second = sample_from_engine(decoder_of("deepseek v3.2"))
    other = first.extras[INDEXER_TOPK]
    narrow = replace(first, extras={INDEXER_TOPK: other[:, :, :-1].copy()})
    with pytest.raises(
        MilesError, match="recorded 8 selected entries per token in 2 layers, but the model in training"
    ):
        one_step(decoder_of("deepseek v3.2"), (narrow,), REPLAY)
    signed = replace(first, extras={INDEXER_TOPK: other.astype(np.int32)})
    with pytest.raises(MilesError, match="indexer_topk of trajectory 0 of prompt 0 are int32"):
        one_step(decoder_of("deepseek v3.2"), (signed, second), REPLAY)
    with pytest.raises(MilesError, match="selects 0 in 0"):
        build_selections(decoder_of("qwen3").spec, torch.zeros(3, 2, 9, dtype=torch.int32))


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_choose_what_one_process_chooses_for_their_heads_and_count_it_once(world):
    spec, rng = decoder_of("minimax-m3").spec, np.random.default_rng(0)
    layout = build_indexer_layout(spec)
    assert layout.groups == 2
    tokens, count = 40, layout.count

    def draw():
        rows = [np.sort(rng.permutation(tokens // 4)[:count]) for _ in range(tokens * layout.groups)]
        return torch.from_numpy(np.array(rows)).view(tokens, layout.groups, count)

    own, recorded, visible_T = draw(), draw(), torch.full((tokens,), tokens)
    recorded[::5] = -1
    recorded[7, 1] = recorded[7, 1].flip(0)  # no selection: it is not ascending
    replay_TLk = recorded.flatten(1)[:, None].expand(-1, len(layout.layers), -1)
    layer = layout.layers[-1]

    def choose(rank, size):
        selections = build_selections(spec, replay_TLk, tp_rank=rank, tp_size=size)
        first = rank * layout.groups // size
        mine = own[:, first : max(first + 1, (rank + 1) * layout.groups // size)]
        return selections.choose(layer, 0, mine, visible_T, unit=4, limit=9), selections.count(torch.device("cpu"))

    whole, counts = choose(0, 1)
    assert counts.tolist()[1:] == [(tokens - 8) * layout.groups * count, 1] and counts[0] > 0
    parts, each = zip(*(choose(rank, world) for rank in range(world)), strict=True)
    assert torch.equal(torch.stack(each).sum(0), counts)
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole[:, rank * layout.groups // world][:, None])


def test_of_equal_scores_the_lowest_position_is_selected_in_every_backend():
    scores = torch.tensor([[2.0, 1.0, 1.0, 1.0, 3.0, 1.0], [0.0] * 6, [-torch.inf] * 5 + [1.0]])
    assert select_topk(scores, 3).tolist() == [[0, 1, 4], [0, 1, 2], [0, 1, 5]]
    assert select_topk(scores, 9).tolist() == [list(range(6))] * 3
    # A model whose indexers score every token alike selects the first ones.
    decoder = decoder_of("deepseek v3.2")
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "indexer.weights_proj" in name:
                parameter.zero_()
    (sample,) = sample_from_engine(decoder, count=1)
    layout = build_indexer_layout(decoder.spec)
    rows = sample.extras[INDEXER_TOPK][layout.count : -1]
    assert (rows == np.arange(layout.count)).all()
    for backend in (VarlenAttentionBackend, BatchInvariantVarlenBackend):
        attention = backend([len(sample)], "cpu")
        model = decoder if backend is VarlenAttentionBackend else with_numerics(decoder, BATCH_INVARIANT)
        with torch.no_grad():
            model(torch.from_numpy(sample.tokens.astype(np.int64)), torch.arange(len(sample)), attention)
        for layer in layout.layers:
            seen = tokens_seen(decoder.spec, layer, attention._selections[layer], 0, len(sample) - 1)
            assert seen == [set(range(layout.count))]
