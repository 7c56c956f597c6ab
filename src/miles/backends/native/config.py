"""Options of the embedded engine."""

from dataclasses import dataclass
from typing import Literal

from miles.config.option import option

MAX_DRAFT_STATES = 32
"""The most drafted tokens of a step of a model with recurrent layers, each of which has a state of its own."""
DEFAULT_MAX_RUNNING = 256
"""Requests that an engine runs at once where nothing is known of its load."""
HEAD_ALGORITHMS = ("mtp", "eagle3")
"""Values of --speculative-algorithm that draft with a head on the policy's hidden states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeConfig:
    """Batch size, KV cache, prefill, vision and CUDA graph options of the embedded engine."""

    engine_max_running: int | None = option(
        None,
        "Maximum number of requests the embedded engine runs at once; by default 256, and in a run on a GPU as many as "
        "it has trajectories in flight, up to 512.",
        unit="requests",
        ge=1,
    )
    engine_page_size: int = option(16, "Tokens per page of the KV cache.", unit="tokens", ge=1)
    engine_kv_tokens: int | None = option(
        None,
        "Size of the KV cache in tokens; by default what all running requests can need, as far as memory allows.",
        unit="tokens",
        ge=1,
    )
    engine_memory_fraction: float = option(
        0.5, "Maximum fraction of the memory free at engine start that the KV cache takes.", gt=0, le=1
    )
    engine_prefill_chunk: int | None = option(
        None,
        "Maximum prompt tokens per engine step, besides one token per decoding request; by default 2,048 on a CPU, "
        "8,192 on a GPU, and 16,384 on a GPU for models under a billion active parameters.",
        unit="tokens",
        ge=1,
    )
    engine_prefill_delay_steps: int | None = option(
        None,
        "Maximum CUDA graph steps that prompts wait to be prefilled together, if 32 or more requests run; by default "
        "0, and 8 with a draft head, where steps with prefill are no CUDA graphs.",
        unit="steps",
        ge=0,
    )
    engine_vision_cache_mib: int = option(
        1024,
        "Memory for the features of images that the vision tower has encoded, which requests with the same image "
        "share; one image must fit.",
        unit="MiB",
        ge=1,
    )
    engine_prefix_cache: bool = option(
        True, "Reuse the KV cache of prefixes that requests share.", off="--disable-engine-prefix-cache"
    )
    engine_state_cache_mib: int = option(
        1024,
        "Memory for recurrent states of prefixes that requests share, in models with recurrent layers; at most one "
        "state for each of --engine-max-running, 0 for none.",
        unit="MiB",
        ge=0,
    )
    engine_return_routed_experts: bool = option(
        True,
        "Return the routed experts of every token of an MoE model, which a trainer can replay.",
        off="--disable-engine-return-routed-experts",
    )
    engine_return_indexer_topk: bool = option(
        False,
        "Record what the indexers of a sparse-attention model select for every token, and return it to requests with "
        "return_indexer_topk; --use-rollout-indexer-replay sets it.",
    )
    speculative_algorithm: Literal["auto", "none", "ngram", "draft-model", "mtp", "eagle3"] = option(
        "auto",
        "Draft tokens and verify several per engine step: from n-grams of a prompt's samples, with a smaller model, "
        "MTP layers or an EAGLE-3 head; auto is ngram where a run stays as repeatable.",
    )
    speculative_draft_model_path: str | None = option(
        None,
        "Folder of the model of --speculative-algorithm draft-model, which has the policy's tokenizer, or of the head "
        "of eagle3.",
    )
    speculative_num_draft_tokens: int = option(
        8,
        "Maximum drafted tokens of a request per engine step, in all its branches; fewer, or none, where more would "
        "not pay.",
        unit="tokens",
        ge=1,
        le=64,
    )
    speculative_num_branches: int = option(
        1,
        "Maximum branches of a draft: what else may follow is verified besides its chain, where that pays; 1 is the "
        "chain alone.",
        unit="branches",
        ge=1,
        le=16,
    )
    speculative_adaptive: bool = option(
        True,
        "Choose how many tokens are drafted, from none to the maximum, by measured acceptance and batch size; "
        "otherwise always the maximum.",
        off="--disable-speculative-adaptive",
    )
    speculative_history_tokens: int = option(
        1_000_000,
        "Tokens of earlier samples kept for --speculative-algorithm ngram; those of the prompts used least recently "
        "are forgotten.",
        unit="tokens",
        ge=1,
    )
    engine_cuda_graph: bool = option(
        True,
        "Run decode steps and short prefills as CUDA graphs; on GPUs only.",
        off="--disable-engine-cuda-graph",
    )

    @property
    def max_running(self) -> int:
        """The maximum number of running requests; the launcher gives that of a run's engine."""
        return DEFAULT_MAX_RUNNING if self.engine_max_running is None else self.engine_max_running

    @property
    def drafts(self) -> bool:
        """Whether an engine with these options drafts tokens; ``auto`` is the launcher's to decide, and none here."""
        return self.speculative_algorithm not in ("auto", "none")

    def count_cached_states(self, state_bytes: int) -> int:
        """Return how many recurrent states of so many bytes an engine keeps for prefixes; 0 without such states."""
        if not state_bytes or not self.engine_prefix_cache:
            return 0
        return min(self.max_running, (self.engine_state_cache_mib << 20) // state_bytes)

    def count_draft_states(self, recurrent: bool) -> int:
        """Return how many recurrent states an engine has besides those of requests, for drafted tokens."""
        return min(self.max_running, MAX_DRAFT_STATES) if recurrent and self.drafts else 0
