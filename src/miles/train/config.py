"""Options of the training plane: batch sizes, optimizer, schedule, memory, parallelism."""

from dataclasses import dataclass
from typing import Literal

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Backend, batch sizes, optimizer, learning rate, micro-batches, recomputation, critic and checkpoint writing."""

    train_backend: Literal["fsdp", "megatron"] = option(
        "fsdp", "Training backend: fsdp, the built-in one that needs only torch, or megatron (Megatron-Core)."
    )
    global_batch_size: int | None = option(
        None, "Trajectories in one optimizer step; when not given it follows from the batch identity.", unit="N", ge=1
    )
    num_steps_per_rollout: int | None = option(
        None,
        "Optimizer steps per rollout batch; when not given it follows from the batch identity.",
        unit="N",
        ge=1,
    )
    seed: int = option(1234, "Random seed of the training plane.", ge=-(2**63), le=2**63 - 1)
    ref_load: str | None = option(
        None, "Folder or hub name of the reference model; --hf-checkpoint when not given.", path=True, hub="model"
    )

    ref_update_interval: int | None = option(
        None,
        "Steps after which the reference model becomes a copy of the policy; never when not given.",
        unit="steps",
        ge=1,
    )

    opd_teacher_load: str | None = option(
        None, "Folder or hub name of the default distillation teacher.", path=True, hub="model"
    )
    opd_teachers: tuple[str, ...] = option(
        (), "Distillation teachers by name: a name, and a folder or hub name, for each.", path="pairs", hub="model"
    )

    critic_load: str | None = option(
        None,
        "Folder or hub name of the initial critic of ppo: a Hugging Face model, or the critic of a checkpoint with its "
        "value head; --hf-checkpoint when not given.",
        path=True,
        hub="model",
    )
    critic_device: str = option(
        "auto",
        "Dedicated device of the critic, such as cuda:1 or cpu; auto shares the policy's device, where both "
        "take turns with the engine.",
    )
    critic_lr: float | None = option(None, "Peak learning rate of the critic; --lr when not given.", ge=0)
    critic_lr_warmup_iters: int = option(
        0, "Optimizer steps over which the critic's learning rate rises to --critic-lr.", unit="N", ge=0
    )
    num_critic_only_steps: int = option(0, "Training steps at the start that train only the critic.", unit="N", ge=0)

    optimizer: Literal["adam", "muon"] = option(
        "adam",
        "Optimizer: adam (AdamW), or muon for the matrices inside layers and adam for the rest.",
    )
    lr: float = option(1e-6, "Peak learning rate.", ge=0)
    vision_lr: float | None = option(
        None,
        "Peak learning rate of the policy's vision tower and projector, scheduled as --lr; --lr when not given.",
        ge=0,
    )
    freeze_vision_tower: bool = option(
        False,
        "Do not train the vision tower, the encoder of images; by default everything is trained.",
    )
    freeze_vision_projector: bool = option(
        False,
        "Do not train the projector, the layers that map the vision tower's output to the decoder's embeddings.",
    )
    min_lr: float = option(0.0, "Final learning rate of a decaying schedule.", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = option(
        "constant", "Learning-rate schedule after the warm-up."
    )
    lr_decay_iters: int | None = option(
        None,
        "Optimizer steps, warm-up included, until --min-lr is reached; the whole run when not given.",
        unit="N",
        ge=1,
    )
    lr_warmup_iters: int = option(0, "Optimizer steps over which the learning rate rises to --lr.", unit="N", ge=0)
    lr_warmup_fraction: float | None = option(
        None, "The warm-up as a fraction of --lr-decay-iters, instead of --lr-warmup-iters.", ge=0, le=1
    )
    adam_beta1: float = option(0.9, "Adam beta1: decay of the first moment.", ge=0, lt=1)
    adam_beta2: float = option(0.999, "Adam beta2: decay of the second moment.", ge=0, lt=1)
    adam_eps: float = option(1e-8, "Adam epsilon.", gt=0)
    weight_decay: float = option(0.01, "Decoupled weight decay of matrices; norms and biases are not decayed.", ge=0)
    muon_momentum: float = option(0.95, "Muon momentum.", ge=0, lt=1)
    muon_use_nesterov: bool = option(True, "Use Nesterov momentum in Muon.")
    muon_num_ns_steps: int = option(5, "Newton-Schulz iterations of Muon's orthogonalization.", unit="N", ge=1, le=99)
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = option(
        "spectral",
        "Scale of Muon's update of a matrix: spectral is the root of its longer side, shape_scaling the root "
        "of rows over columns if above 1, unit_rms_norm the root of rows over columns.",
    )
    muon_extra_scale_factor: float = option(
        0.2,
        "Additional factor of Muon's update; 0.2 with spectral matches Adam's update norm, so that --lr fits both.",
        gt=0,
    )
    optimizer_state_dtype: Literal["float32", "bfloat16", "int8"] = option(
        "float32",
        "Storage dtype of the optimizer moments; int8 is block-quantized with a scale per 256 values, and "
        "master weights stay float32.",
    )
    reset_optimizer_states: bool = option(
        False, "Forget the optimizer's moments after every rollout step; master weights and the schedule stay."
    )
    optimizer_cpu_offload: bool = option(
        False,
        "Keep optimizer moments and master weights in host memory and stream them through the device in each update.",
    )
    clip_grad: float = option(
        1.0, "Maximum global gradient norm; larger gradients are scaled down, and 0 disables clipping.", ge=0
    )

    draft_train: Literal["none", "mtp", "eagle3"] = option(
        "none",
        "Draft model of speculative decoding to train beside the policy, which it does not change: mtp, the "
        "multi-token-prediction layers of the checkpoint (--enable-mtp-training), or eagle3, an EAGLE-3 head.",
        presets={"--enable-mtp-training": "mtp"},
    )
    draft_load: str | None = option(
        None,
        "Folder or hub name of the EAGLE-3 head to start from; a new one is made from --seed when not given.",
        path=True,
        hub="model",
    )
    draft_lr: float = option(1e-4, "Learning rate of the draft model.", ge=0)
    draft_loss: Literal["soft", "hard"] = option(
        "soft",
        "Loss of the draft model: soft, cross-entropy against the policy's distribution, or hard, against the sampled "
        "tokens.",
    )
    draft_train_steps: int = option(
        3, "Tokens that the draft model is trained to predict one after the other.", unit="N", ge=1
    )
    mtp_num_layers: int | None = option(
        None, "Number of MTP layers that the checkpoint must have; any number when not given.", unit="N", ge=0
    )
    mtp_loss_scaling_factor: float = option(0.1, "Factor of the draft model's loss.", gt=0)

    max_tokens_per_gpu: int = option(
        16384, "Maximum tokens per micro-batch; samples are packed up to it without padding.", unit="TOKENS", ge=1
    )
    max_patches_per_gpu: int | None = option(
        None,
        "Maximum image patches per micro-batch, each different image counted once; when not given only "
        "--max-tokens-per-gpu limits them, since an image has a token for every few patches.",
        unit="PATCHES",
        ge=1,
    )
    use_dynamic_batch_size: bool = option(
        False, "Pack micro-batches by --max-tokens-per-gpu even where --micro-batch-size is given."
    )
    balance_data: bool = option(
        True,
        "Balance a batch over the data-parallel ranks; off keeps its order.",
    )
    balance_by: Literal["tokens", "flops"] = option(
        "tokens",
        "What --balance-data balances: tokens, or FLOPs (--balance-by-flops), which grow with the square of a sample's "
        "length.",
        presets={"--balance-by-flops": "flops"},
    )
    share_prefix: bool | None = option(
        None,
        "Compute the common prefix of samples of one prompt once per micro-batch, in training too; when not given, on a"
        " GPU where an estimate for the batch says that it pays.",
    )
    micro_batch_size: int | None = option(
        None, "Samples per micro-batch, instead of packing by --max-tokens-per-gpu.", unit="N", ge=1
    )
    log_probs_chunk_size: int | None = option(
        None,
        "Tokens whose logits are materialised at a time, twice; chosen by the vocabulary size when not given, and on a "
        "GPU computed once where their gradients fit.",
        unit="TOKENS",
        ge=1,
    )
    gradient_checkpointing: bool = option(
        False, "Activation checkpointing of every layer; short for --recompute-granularity full."
    )
    recompute_granularity: Literal["full", "selective"] | None = option(
        None,
        "Activation recomputation: full recomputes a layer from its input; selective recomputes everything "
        "but matmuls and attention.",
    )
    recompute_method: Literal["uniform", "block"] = option(
        "uniform", "Layers to recompute: uniform, each by itself; block, the first --recompute-num-layers."
    )
    recompute_num_layers: int = option(
        1, "Number of recomputed layers under --recompute-method block; 1 under uniform.", unit="N", ge=1
    )
    offload_train: bool | None = option(
        None,
        "Offload the optimizer state to host memory while the engine uses the device; when not given, only if"
        " the two do not fit on it together.",
    )

    offload: bool = option(False, "Short for --offload-train --offload-rollout.")
    async_save: bool = option(
        False,
        "Write checkpoints in the background from a copy in host memory; training waits only for the copy.",
    )
    ckpt_format: Literal["hf", "torch_dist"] = option(
        "hf",
        "Format of checkpoints: hf, a Hugging Face model; torch_dist, Megatron's distributed checkpoints, with "
        "--train-backend megatron.",
    )
    verify_checkpoints: bool = option(True, "Read checkpoint files back from disk and compare their digests.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Tensor, context, expert and pipeline parallel sizes; the remaining ranks are data-parallel and shard."""

    tensor_model_parallel_size: int = option(
        1,
        "Tensor-parallel size: ranks that split the heads and channels of every layer, and the vocabulary.",
        unit="N",
        ge=1,
    )
    sequence_parallel: bool = option(
        False,
        "Sequence parallelism: split the tokens between layers over the tensor-parallel ranks, which saves "
        "activation memory.",
    )
    context_parallel_size: int = option(
        1, "Context-parallel size: ranks that split the tokens of every sequence.", unit="N", ge=1
    )
    expert_model_parallel_size: int = option(
        1,
        "Expert-parallel size: ranks that split the experts of a layer, out of the ranks that shard parameters.",
        unit="N",
        ge=1,
    )
    expert_tensor_parallel_size: int | None = option(
        None, "Tensor-parallel size within an expert; --tensor-model-parallel-size when not given.", unit="N", ge=1
    )
    pipeline_model_parallel_size: int = option(
        1, "Pipeline-parallel size: ranks that hold consecutive layers each; megatron backend only.", unit="N", ge=1
    )
    data_parallel_replicate_size: int = option(
        1, "HSDP replicas of the parameters, each sharded over its own ranks; 1 shards over all ranks.", unit="N", ge=1
    )
    fsdp_cpu_offload: bool = option(
        False,
        "Keep parameters, gradients and optimizer state in host memory, and copy a layer to the device when "
        "it is needed.",
    )
    distributed_timeout_minutes: int = option(
        10, "Timeout of collective operations before a rank gives up.", unit="MINUTES", ge=1
    )
