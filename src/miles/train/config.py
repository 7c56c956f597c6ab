"""Knobs of the training plane: batch sizes, optimizer, schedule, memory."""

from dataclasses import dataclass
from typing import Literal

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How a batch becomes new weights."""

    train_backend: Literal["fsdp", "megatron"] = knob(
        "fsdp", "Which trainer runs: fsdp, the embedded one that needs only torch, or megatron, by Megatron-Core."
    )
    global_batch_size: int | None = knob(
        None, "Trajectories in one optimizer step; when not given it follows from the batch identity.", unit="N"
    )
    num_steps_per_rollout: int | None = knob(
        None, "Optimizer steps made of one rollout batch; when not given it follows from the batch identity.", unit="N"
    )
    seed: int = knob(1234, "Seed of the randomness of the training plane.")
    ref_load: str | None = knob(
        None, "Folder of the reference model in Hugging Face format; --hf-checkpoint when not given.", path=True
    )

    opd_teacher_load: str | None = knob(
        None, "Folder of the teacher of distillation in Hugging Face format, for prompts that name none.", path=True
    )
    opd_teachers: tuple[str, ...] = knob(
        (), "Teachers of prompts that name them: a name and a folder for each.", path="pairs"
    )

    critic_load: str | None = knob(
        None,
        "Folder the critic of ppo starts from: a Hugging Face model, or the critic of a checkpoint with its value "
        "head; --hf-checkpoint when not given.",
        path=True,
    )
    critic_device: str = knob(
        "auto",
        "Device that the critic has to itself, such as cuda:1 or cpu; auto is the policy's own, of which the two take "
        "turns with the engine.",
    )
    critic_lr: float | None = knob(None, "Highest learning rate of the critic; --lr when not given.")
    critic_lr_warmup_iters: int = knob(
        0, "Optimizer steps over which the critic's learning rate rises to --critic-lr.", unit="N"
    )
    num_critic_only_steps: int = knob(
        0, "Training steps at the start in which only the critic learns and the policy stays as it is.", unit="N"
    )

    optimizer: Literal["adam", "muon"] = knob(
        "adam",
        "What updates the weights: adam, with decoupled decay, or muon for the matrices inside layers and adam for the "
        "rest.",
    )
    lr: float = knob(1e-6, "Highest learning rate.")
    min_lr: float = knob(0.0, "Learning rate that a decaying schedule ends at.")
    lr_decay_style: Literal["constant", "linear", "cosine"] = knob(
        "constant", "How the learning rate moves after the warm-up."
    )
    lr_decay_iters: int | None = knob(
        None, "Optimizer steps, warm-up included, until --min-lr is reached; all of the run's when not given.", unit="N"
    )
    lr_warmup_iters: int = knob(0, "Optimizer steps over which the learning rate rises to --lr.", unit="N")
    lr_warmup_fraction: float | None = knob(
        None, "The warm-up as a fraction of --lr-decay-iters, instead of --lr-warmup-iters."
    )
    adam_beta1: float = knob(0.9, "Decay of the mean of gradients.")
    adam_beta2: float = knob(0.999, "Decay of the mean of squared gradients.")
    adam_eps: float = knob(1e-8, "Added to the root of the mean of squared gradients.")
    weight_decay: float = knob(0.01, "Decoupled weight decay of matrices; norms and biases are not decayed.")
    muon_momentum: float = knob(0.95, "Decay of Muon's mean of gradients.")
    muon_use_nesterov: bool = knob(True, "Let Muon look one gradient ahead of its mean.")
    muon_num_ns_steps: int = knob(5, "Newton-Schulz iterations by which Muon makes an update orthogonal.", unit="N")
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = knob(
        "spectral",
        "What Muon's update of a matrix is multiplied with: the root of its longer side, of rows over columns if above "
        "1, or of rows over columns.",
    )
    muon_extra_scale_factor: float = knob(
        0.2, "Further factor on Muon's update; 0.2 with spectral makes it as long as Adam's, so that --lr fits both."
    )
    optimizer_state_dtype: Literal["float32", "bfloat16", "int8"] = knob(
        "float32",
        "What the optimizer's moments are kept in; int8 is a code with a scale for every 256 numbers, and masters stay "
        "float32.",
    )
    optimizer_cpu_offload: bool = knob(
        False,
        "Keep moments and masters on the host at all times and stream them through the device in each update.",
    )
    clip_grad: float = knob(1.0, "Largest global norm of a gradient; longer ones are scaled down, and 0 means never.")

    max_tokens_per_gpu: int = knob(
        16384, "Most tokens in one micro-batch; samples are packed up to it without padding.", unit="TOKENS"
    )
    use_dynamic_batch_size: bool = knob(
        False, "Pack micro-batches by --max-tokens-per-gpu even where --micro-batch-size is given."
    )
    balance_data: bool = knob(
        True,
        "Deal a batch out over the data-parallel ranks so that all have as much to do; off, in the order it came.",
    )
    balance_by: Literal["tokens", "flops"] = knob(
        "tokens",
        "What --balance-data evens out: tokens, or operations, which grow with the square of a sample's length.",
    )
    share_prefix: bool = knob(
        False,
        "Read what samples of one prompt begin with once for all of them in a micro-batch, in training as well.",
    )
    micro_batch_size: int | None = knob(
        None, "Cut micro-batches of this many samples, and not by --max-tokens-per-gpu.", unit="N"
    )
    log_probs_chunk_size: int | None = knob(
        None, "Tokens whose logits exist at one time; chosen by the vocabulary's size when not given.", unit="TOKENS"
    )
    gradient_checkpointing: bool = knob(
        False, "Keep only the input of each layer for the backward pass: --recompute-granularity full for short."
    )
    recompute_granularity: Literal["full", "selective"] | None = knob(
        None,
        "What a backward pass computes again: full, all of a layer but its input; selective, all but the products of "
        "matrices and attention.",
    )
    recompute_method: Literal["uniform", "block"] = knob(
        "uniform", "Which layers are recomputed: uniform, each by itself; block, the first --recompute-num-layers."
    )
    recompute_num_layers: int = knob(
        1, "How many layers are recomputed under --recompute-method block; 1 under uniform.", unit="N"
    )
    offload_train: bool | None = knob(
        None,
        "Keep the optimizer's state on the host while the engine has the device; when not given, only where it "
        "would take a quarter of what is free.",
    )

    async_save: bool = knob(
        False,
        "Write checkpoints while training goes on, out of a copy in host memory; training waits only for the copy.",
    )
    verify_checkpoints: bool = knob(
        True, "Read a checkpoint's tensors again from the disk and compare them with what was in memory."
    )
