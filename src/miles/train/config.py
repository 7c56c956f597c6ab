"""Knobs of the training plane: batch sizes, optimizer, schedule, memory."""

from dataclasses import dataclass
from typing import Literal

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How a batch becomes new weights."""

    train_backend: Literal["fsdp"] = knob("fsdp", "Which trainer runs; fsdp is the embedded one and needs only torch.")
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

    optimizer: Literal["adam"] = knob("adam", "Which optimizer updates the weights; adam decays weights decoupled.")
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
    clip_grad: float = knob(1.0, "Largest global norm of a gradient; longer ones are scaled down, and 0 means never.")

    max_tokens_per_gpu: int = knob(
        16384, "Most tokens in one micro-batch; samples are packed up to it without padding.", unit="TOKENS"
    )
    use_dynamic_batch_size: bool = knob(
        False, "Pack micro-batches by --max-tokens-per-gpu even where --micro-batch-size is given."
    )
    micro_batch_size: int | None = knob(
        None, "Cut micro-batches of this many samples, and not by --max-tokens-per-gpu.", unit="N"
    )
    log_probs_chunk_size: int | None = knob(
        None, "Tokens whose logits exist at one time; chosen by the vocabulary's size when not given.", unit="TOKENS"
    )
    gradient_checkpointing: bool = knob(
        False, "Keep only the input of each layer for the backward pass and compute the rest again."
    )
    offload_train: bool | None = knob(
        None,
        "Keep the optimizer's state on the host while the engine has the device; when not given, only where it "
        "would take a quarter of what is free.",
    )
