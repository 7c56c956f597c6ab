"""Knobs of the layout: how the ranks of the training plane share a model and a batch (see cluster.layout)."""

from dataclasses import dataclass

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Over how many ranks each thing is cut; what is left of them cuts parameters and deals out the batch."""

    tensor_model_parallel_size: int = knob(
        1,
        "Ranks that share every layer: each has some of its heads and channels, and of the vocabulary.",
        unit="N",
    )
    sequence_parallel: bool = knob(
        False, "Cut the tokens between a layer's parts over the tensor ranks, which then keep fewer of them."
    )
    context_parallel_size: int = knob(1, "Ranks that share every sequence: each has some of its tokens.", unit="N")
    expert_model_parallel_size: int = knob(
        1, "Ranks that share the experts of a layer; they are among those that cut parameters.", unit="N"
    )
    expert_tensor_parallel_size: int | None = knob(
        None, "Ranks over which the channels of one expert are cut; all tensor ranks when not given.", unit="N"
    )
    pipeline_model_parallel_size: int = knob(
        1, "Ranks that have some of the layers each, one after the other; the megatron backend alone.", unit="N"
    )
    data_parallel_replicate_size: int = knob(
        1, "Copies of the parameters, each cut over the ranks of its own; 1 cuts them over all.", unit="N"
    )
    fsdp_cpu_offload: bool = knob(
        False,
        "Keep parameters, gradients and optimizer on the host, and bring a layer's to the device as it is needed.",
    )
    distributed_timeout_minutes: int = knob(
        10, "How long a rank waits for the others before it gives the run up.", unit="MINUTES"
    )
