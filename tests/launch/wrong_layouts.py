"""Command lines that say what cannot be laid out, scheduled or measured so, and every sentence each must be told."""

from importlib.util import find_spec

NO_RAY = () if find_spec("ray") else ("--runtime ray needs the package ray: pip install 'miles-rl[ray]'.",)

LAYOUTS: list[tuple[str, list[str]]] = [
    (
        "--optimizer muon --model-impl transformers",
        [
            "--hf-checkpoint model cannot be used: model holds neither model.safetensors nor "
            "model.safetensors.index.json: save the model as safetensors.",
            "--optimizer muon updates matrices, and which those are is known of our own decoders alone; "
            "use --model-impl native, or --optimizer adam.",
        ],
    ),
    (
        "--fsdp-cpu-offload",
        [
            "--fsdp-cpu-offload brings layers to the device as ranks gather them, and here no two ranks share one; ask "
            "for more with --actor-num-gpus-per-node, or keep the optimizer alone on the host with "
            "--optimizer-cpu-offload."
        ],
    ),
    (
        "--gradient-checkpointing --recompute-granularity selective",
        ["--gradient-checkpointing is --recompute-granularity full, and selective is given as well; keep one."],
    ),
    (
        "--recompute-granularity full --recompute-num-layers 4",
        [
            "--recompute-num-layers 4 is for --recompute-method block; "
            "under uniform every layer is recomputed by itself, which is 1."
        ],
    ),
    (
        "--recompute-method block",
        ["--recompute-method block says which layers are recomputed, and none are; add --recompute-granularity."],
    ),
    (
        "--lr-warmup-iters 3 --lr-warmup-fraction 0.1",
        ["--lr-warmup-iters and --lr-warmup-fraction both set the warm-up; keep one."],
    ),
    ("--lr 1e-6 --min-lr 1", ["--min-lr 1 is above --lr 1e-06; a schedule ends at or below its peak."]),
    (
        "--lr-warmup-iters 30 --lr-decay-iters 20",
        ["--lr-warmup-iters 30 is longer than the whole --lr-decay-iters 20."],
    ),
    ("--parity-stop 0.001", ["--parity-stop 0.001 is below --parity-tolerance 0.01; the light turns red first."]),
    (
        "--eval-interval 5",
        ["--eval-interval needs --eval-prompt-data: a name and a file for each held-out set."],
    ),
    (
        "--eval-prompt-data held",
        ["--eval-prompt-data takes pairs of a name and a file, and these do not pair up: held."],
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
        ["--use-rollout-routing-replay is for mixtures of experts, and --hf-checkpoint is not one; leave it out."],
    ),
    (
        "--hf-checkpoint moe --use-rollout-routing-replay --disable-engine-record-routing",
        ["--use-rollout-routing-replay needs recorded routing; drop --disable-engine-record-routing."],
    ),
    (
        "--rollout-max-prompt-len 100 --rollout-max-context-len 100",
        ["--rollout-max-prompt-len 100 leaves no room for a response within --rollout-max-context-len 100."],
    ),
    (
        "--shelf-window 4",
        ["--shelf-window 4 lets groups overtake further than --max-weight-staleness 0 allows; at most 1 here."],
    ),
    (
        "--rollout-max-prompt-len 1024",
        ["--rollout-max-prompt-len 1024 is more than the 512 positions of --hf-checkpoint; lower it."],
    ),
    (
        "--rollout-num-gpus-per-engine 3",
        [
            "--rollout-num-gpus-per-engine 3 cannot share this model: layer 0 has 4 attention heads, "
            "which they cannot divide evenly; choose a number that does."
        ],
    ),
    (
        "--rollout-num-gpus-per-engine 2 --rollout-num-gpus 4",
        [
            "--rollout-num-gpus 4 with --rollout-num-gpus-per-engine 2 is not one engine, and this process has room "
            "for one; leave --rollout-num-gpus out, or say --rollout-backend served."
        ],
    ),
    (
        "--actor-num-nodes 2 --tensor-model-parallel-size 2",
        [
            "--actor-num-nodes 2 asks for several machines, and --runtime local is one; say --runtime ray, or give "
            "--actor-num-gpus-per-node all devices of this machine, and make room with --gradient-checkpointing or a "
            "lower --max-tokens-per-gpu."
        ],
    ),
    ("--ray-address auto", ["--ray-address auto is for --runtime ray; say that, or leave it out."]),
    (
        "--runtime ray",
        [*NO_RAY, "--runtime ray starts engines as servers on its nodes: say --rollout-backend served, or sglang."],
    ),
    (
        "--runtime ray --rollout-backend served --actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 3",
        [
            "--rollout-num-gpus-per-engine 3 cannot share this model: layer 0 has 4 attention heads, which they cannot "
            "divide evenly; choose a number that does.",
            *NO_RAY,
            "--rollout-num-gpus-per-engine 3 does not divide --actor-num-gpus-per-node 4, and an engine that shares "
            "the trainer's devices has all of its own on one node; choose a divisor, or give engines devices of their "
            "own with --rollout-num-gpus.",
        ],
    ),
    (
        "--tensor-model-parallel-size 2 --context-parallel-size 2 --actor-num-gpus-per-node 6",
        [
            "--tensor-model-parallel-size 2 × --context-parallel-size 2 = 4 needs a multiple of 4 ranks, and "
            "--actor-num-gpus-per-node 6 gives 6; ask for 8 devices, or for less."
        ],
    ),
    (
        "--tensor-model-parallel-size 2",
        [
            "--tensor-model-parallel-size 2 needs a multiple of 2 ranks, and --actor-num-gpus-per-node 1 gives 1; "
            "ask for 2 devices, or for less."
        ],
    ),
    (
        "--tensor-model-parallel-size 3 --actor-num-gpus-per-node 3",
        [
            "--hf-checkpoint cannot be trained so: the model cannot be cut across 3 tensor ranks: layer 0 has 4 "
            "attention heads, which they cannot divide evenly."
        ],
    ),
    (
        "--actor-num-gpus-per-node 4 --hf-checkpoint moe --expert-model-parallel-size 3 "
        "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
        [
            "--expert-model-parallel-size 3 does not divide the 2 ranks over which parameters are cut here; "
            "choose 1 or 2.",
            "--expert-tensor-parallel-size 1 is not --tensor-model-parallel-size 2, and --train-backend fsdp cuts "
            "experts over the tensor ranks as it does all else; leave it out.",
        ],
    ),
    (
        "--megatron-attention-dropout 0.1",
        ["--megatron-attention-dropout is for --train-backend megatron; leave it out."],
    ),
    (
        "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --sequence-parallel",
        [
            "--pipeline-model-parallel-size 2 is not for --train-backend fsdp, which has every layer on every rank; "
            "leave it out, and parameters are cut over these ranks instead.",
            "--sequence-parallel cuts tokens over the tensor ranks, and there is one; leave it out, or give "
            "--tensor-model-parallel-size.",
        ],
    ),
    (
        "--actor-num-gpus-per-node 2 --loss-type rm_loss --n-samples-per-prompt 1 --no-rm-type",
        ["--loss-type rm_loss trains on one device, by fsdp; leave --actor-num-gpus-per-node 2 out."],
    ),
]
