"""Invalid layouts, schedules and metrics options, and every error message each must produce."""

from importlib.util import find_spec

NO_RAY = () if find_spec("ray") else ("--runtime ray needs the package ray: pip install 'miles-rl[ray]'.",)

LAYOUTS: list[tuple[str, list[str]]] = [
    (
        "--optimizer muon --model-impl transformers",
        [
            "--hf-checkpoint model cannot be used: model holds neither model.safetensors nor "
            "model.safetensors.index.json: save the model as safetensors.",
            "--optimizer muon needs the native model; use --optimizer adam, or remove --model-impl transformers.",
        ],
    ),
    (
        "--kv-cache-dtype fp8_e4m3 --model-impl transformers",
        [
            "--hf-checkpoint model cannot be used: model holds neither model.safetensors nor "
            "model.safetensors.index.json: save the model as safetensors.",
            "--kv-cache-dtype fp8_e4m3 needs the native model; remove it, or --model-impl transformers.",
        ],
    ),
    (
        "--fsdp-cpu-offload",
        [
            "--fsdp-cpu-offload needs parameters sharded over at least 2 ranks; use more GPUs with "
            "--actor-num-gpus-per-node, or offload only the optimizer with --optimizer-cpu-offload.",
        ],
    ),
    (
        "--gradient-checkpointing --recompute-granularity selective",
        [
            "--gradient-checkpointing means --recompute-granularity full, but selective is given as well; keep one.",
        ],
    ),
    (
        "--recompute-granularity full --recompute-num-layers 4",
        [
            "--recompute-num-layers needs --recompute-method block; add that, or remove --recompute-num-layers.",
        ],
    ),
    (
        "--recompute-method block",
        [
            "--recompute-method needs --recompute-granularity; add that, or remove --recompute-method.",
        ],
    ),
    (
        "--lr-warmup-iters 3 --lr-warmup-fraction 0.1",
        ["--lr-warmup-iters and --lr-warmup-fraction both set the warm-up; keep one."],
    ),
    (
        "--lr 1e-6 --min-lr 1",
        [
            "--min-lr 1 is above --lr 1e-06; lower --min-lr.",
        ],
    ),
    (
        "--lr-warmup-iters 30 --lr-decay-iters 20",
        [
            "--lr-warmup-iters 30 is longer than --lr-decay-iters 20; shorten it.",
        ],
    ),
    (
        "--parity-stop 0.001",
        [
            "--parity-stop 0.001 is below --parity-tolerance 0.01, which warns first; raise it.",
        ],
    ),
    (
        "--eval-interval 5",
        [
            "--eval-interval needs --eval-prompt-data, a name and a file for each held-out set; add that,"
            " or remove --eval-interval.",
        ],
    ),
    (
        "--eval-prompt-data held",
        ["--eval-prompt-data held held does not exist."],
    ),
    (
        "--eval-prompt-data a data/held.jsonl a data/held.jsonl",
        ["--eval-prompt-data names the set a twice; give each held-out set its own name."],
    ),
    (
        "--eval-prompt-data held data/hold.jsonl",
        ["--eval-prompt-data held data/hold.jsonl does not exist; data holds held.jsonl, train.jsonl."],
    ),
    (
        "--use-rollout-routing-replay",
        [
            "--use-rollout-routing-replay is for mixture-of-experts models, which --hf-checkpoint is not; remove it.",
        ],
    ),
    (
        "--hf-checkpoint moe --use-rollout-routing-replay --disable-engine-return-routed-experts",
        [
            "--use-rollout-routing-replay needs the routed experts; remove --disable-engine-return-routed-experts.",
        ],
    ),
    (
        "--rollout-max-prompt-len 100 --rollout-max-context-len 100",
        [
            "--rollout-max-prompt-len 100 leaves no tokens for a response within "
            "--rollout-max-context-len 100; lower it.",
        ],
    ),
    (
        "--reorder-window 4",
        [
            "--reorder-window 4 lets groups overtake further than --max-weight-staleness 0 allows; use at most 1.",
        ],
    ),
    (
        "--rollout-max-prompt-len 1024",
        [
            "--rollout-max-prompt-len 1024 exceeds the 512 positions of --hf-checkpoint; lower it.",
        ],
    ),
    (
        "--rollout-num-gpus-per-engine 3",
        [
            "--rollout-num-gpus-per-engine 3 cannot shard this model: layer 0 has 4 attention heads, "
            "which they cannot divide evenly; choose another number.",
        ],
    ),
    (
        "--rollout-num-gpus-per-engine 2 --rollout-num-gpus 4 --rollout-backend native",
        [
            "--rollout-num-gpus 4 with --rollout-num-gpus-per-engine 2 is not one engine, and this "
            "process runs only one; remove --rollout-num-gpus, or use --rollout-backend served.",
        ],
    ),
    (
        "--actor-num-nodes 2 --tensor-model-parallel-size 2 --runtime local",
        [
            "--actor-num-nodes 2 needs several machines, but --runtime local is one; use --runtime ray, "
            "or give all GPUs of this machine with --actor-num-gpus-per-node.",
        ],
    ),
    (
        "--ray-address auto",
        [
            "--ray-address needs --runtime ray; add that, or remove --ray-address.",
        ],
    ),
    (
        "--runtime ray",
        [
            "--runtime ray starts engines as servers on its nodes; use --rollout-backend served or sglang.",
            *NO_RAY,
        ],
    ),
    (
        "--runtime ray --rollout-backend served --actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 3",
        [
            "--rollout-num-gpus-per-engine 3 cannot shard this model: layer 0 has 4 attention heads, "
            "which they cannot divide evenly; choose another number.",
            "--rollout-num-gpus-per-engine 3 does not divide --actor-num-gpus-per-node 4, but an engine "
            "that shares the trainer's devices must be on one node; choose a divisor, or give engines "
            "devices of their own with --rollout-num-gpus.",
            *NO_RAY,
        ],
    ),
    (
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --actor-num-gpus-per-node 6",
        [
            "--tensor-model-parallel-size 2 × --context-parallel-size 2 = 4 needs a multiple of 4 ranks, "
            "but --actor-num-gpus-per-node 6 gives 6; use 8 GPUs, or smaller sizes.",
        ],
    ),
    (
        "--tensor-model-parallel-size 2",
        [
            "--tensor-model-parallel-size 2 needs a multiple of 2 ranks, but --actor-num-gpus-per-node 1 "
            "gives 1; use 2 GPUs, or smaller sizes.",
        ],
    ),
    (
        "--tensor-model-parallel-size 3 --actor-num-gpus-per-node 3",
        [
            "--hf-checkpoint does not fit the parallel sizes: the model cannot be split over 3 tensor "
            "parallel ranks: layer 0 has 4 attention heads, which they cannot divide evenly.",
        ],
    ),
    (
        "--actor-num-gpus-per-node 4 --hf-checkpoint moe --expert-model-parallel-size 3 "
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --train-backend fsdp",
        [
            "--expert-model-parallel-size 3 does not divide the 2 ranks that shard parameters here; use 1 or 2.",
            "--expert-tensor-parallel-size 1 is not --tensor-model-parallel-size 2, but --train-backend "
            "fsdp shards experts over the tensor ranks too; remove it.",
        ],
    ),
    (
        "--megatron-attention-dropout 0.1",
        [
            "--megatron-attention-dropout needs --train-backend megatron; add that, or remove "
            "--megatron-attention-dropout.",
        ],
    ),
    (
        "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --train-backend fsdp",
        [
            "--pipeline-model-parallel-size needs --train-backend megatron; add that, or remove "
            "--pipeline-model-parallel-size.",
        ],
    ),
]
