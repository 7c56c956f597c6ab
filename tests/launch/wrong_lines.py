"""Command lines with something wrong, and every sentence each must be told."""

from importlib.metadata import version
from importlib.util import find_spec

from miles.models.families.table import FAMILIES

NO_RAY = () if find_spec("ray") else ("--runtime ray needs the package ray: pip install 'miles-rl[ray]'.",)

# A complete recipe, and what is wrong with a command line that says this as well.
WRONG: list[tuple[str, list[str]]] = [
    # words
    ("--rollout-batch-sise 3", ["--rollout-batch-sise is not a flag; did you mean --rollout-batch-size?"]),
    ("--rollout_batch_size 16", ["--rollout_batch_size is not a flag; did you mean --rollout-batch-size?"]),
    ("--kumquat", ["--kumquat is not a flag; see --help for all of them."]),
    ("-lr 3", ["-lr is not a flag; did you mean --lr?"]),
    ("more.toml", ["'more.toml' is not expected here: values follow their flag, as in --lr 1e-6."]),
    ("--colocate more.toml", ["--colocate takes no value, but was given 'more.toml'."]),
    ("--lr", ["--lr needs a value: a number."]),
    ("--lr --colocate", ["--lr needs a value: a number."]),
    ("--lr abc", ["--lr takes a number, not 'abc'."]),
    ("--lr 1,5", ["--lr takes a number, not '1,5'."]),
    ("--lr 1e-6 2e-6", ["--lr takes one value, but was given 2: 1e-6 2e-6."]),
    ("--lr nan", ["--lr takes a number, not 'nan'."]),
    ("--lr 1e-6 --lr 1e-5", ["'--lr 1e-6' and '--lr 1e-5' contradict each other; keep one."]),
    ("--num-rollout 1e3", ["--num-rollout takes a whole number, not '1e3'."]),
    ("--num-rollout ten", ["--num-rollout takes a whole number, not 'ten'."]),
    (
        "--hf-checkpoint ''",
        ["--hf-checkpoint was given an empty value, but takes text (is a shell variable unset?)."],
    ),
    ("--use-kl-loss true", ["--use-kl-loss takes no value, but was given 'true'."]),
    ("--use-kl-loss --no-use-kl-loss", ["'--use-kl-loss' and '--no-use-kl-loss' contradict each other; keep one."]),
    (
        "--kl-loss-type low_var",
        ["--kl-loss-type takes one of k1, k2, k3, low_var_kl, not 'low_var'; did you mean low_var_kl?"],
    ),
    (
        "--advantage-estimator best",
        [
            "--advantage-estimator takes one of grpo, gspo, cispo, rloo, maxrl, opo, reinforce_plus_plus, "
            "reinforce_plus_plus_baseline, ppo, on_policy_distillation, not 'best'."
        ],
    ),
    (
        "--apply-chat-template-kwargs {a:1}",
        ["--apply-chat-template-kwargs takes a JSON object like '{\"key\": 1}', not '{a:1}'."],
    ),
    ("--rollout-stop-token-ids 1 two", ["--rollout-stop-token-ids takes whole numbers, not 'two'."]),
    # flags of other houses
    (
        "--attention-dropout 0.1",
        [
            "--attention-dropout belongs to Megatron, whose own flags are given as --megatron-... under "
            "--train-backend megatron; leave it out."
        ],
    ),
    (
        "--sglang-mem-fraction-static 0.8",
        [
            "--sglang-mem-fraction-static is for servers that --rollout-backend sglang starts; say that, or leave it "
            "out."
        ],
    ),
    (
        "--rollout-backend sglang --sglang-python /no/such/python --sglang-port 1 --rollout-max-restarts -1",
        [
            "--rollout-max-restarts must be at least 0, not -1.",
            "--sglang-port is decided by Miles; leave it out.",
            "--sglang-python /no/such/python is no program that can be run.",
        ],
    ),
    (
        "--rollout-num-engines 2",
        ["--rollout-num-engines 2 is for servers; say --rollout-backend served, or leave it out."],
    ),
    (
        "--rollout-external-engine-addrs http://a:1 http://a:1 --rollout-num-engines 2",
        [
            "--rollout-external-engine-addrs names servers that run already, so --rollout-num-engines means nothing; "
            "leave it out.",
            "--rollout-external-engine-addrs names a server twice; name each once.",
        ],
    ),
    (
        "--rollout-engine-token-env NO_SUCH_VARIABLE_HERE --rollout-external-engine-addrs http://a:1",
        ["--rollout-engine-token-env NO_SUCH_VARIABLE_HERE: there is no such environment variable, or it is empty."],
    ),
    (
        "--rollout-backend served --rollout-num-gpus 3 --rollout-num-gpus-per-engine 2",
        ["--rollout-num-gpus 3 are no whole number of engines of --rollout-num-gpus-per-engine 2."],
    ),
    (
        "--num-layers 28",
        ["--num-layers describes the model, which the checkpoint's own config.json does here; leave it out."],
    ),
    (
        "--use-wandb",
        ["--use-wandb is not in this version; use --use-tensorboard, or read metrics.jsonl in the run directory."],
    ),
    # ranges
    ("--lr -1", ["--lr must be at least 0, not -1."]),
    ("--rollout-top-p 0", ["--rollout-top-p must be above 0 and at most 1, not 0."]),
    ("--rollout-top-p 1.5", ["--rollout-top-p must be above 0 and at most 1, not 1.5."]),
    ("--rollout-top-k 0", ["--rollout-top-k must be at least 1, or -1, not 0."]),
    ("--max-weight-staleness -1", ["--max-weight-staleness must be at least 0, not -1."]),
    ("--save-interval 0", ["--save-interval must be at least 1, not 0."]),
    ("--eps-clip-high -0.1", ["--eps-clip-high must be at least 0, not -0.1."]),
    ("--eps-clip-c 1", ["--eps-clip-c must be above 1, not 1."]),
    ("--adam-beta2 1", ["--adam-beta2 must be at least 0 and below 1, not 1."]),
    ("--rollout-stop-token-ids 3 -4", ["--rollout-stop-token-ids must be at least 0, not -4."]),
    ("--num-rollout 0", ["--num-rollout must be at least 1, not 0."]),
    # what is on disk
    (
        "--hf-checkpoint nowhere",
        ["--hf-checkpoint nowhere does not exist; name the local folder of a Hugging Face checkpoint."],
    ),
    ("--hf-checkpoint good.toml", ["--hf-checkpoint good.toml is a file; name the folder it is in."]),
    (
        "--hf-checkpoint weights",
        [
            "--hf-checkpoint weights has no config.json, only model.safetensors; name the folder of a Hugging Face "
            "checkpoint."
        ],
    ),
    (
        "--hf-checkpoint empty",
        ["--hf-checkpoint empty has no config.json, nothing; name the folder of a Hugging Face checkpoint."],
    ),
    (
        "--hf-checkpoint odd",
        [
            "--hf-checkpoint odd cannot be used: architectures of config.json is OddForCausalLM, which is not "
            f"supported; the supported ones are {', '.join(dict.fromkeys(f.architectures[0] for f in FAMILIES))}. "
            f"The installed transformers {version('transformers')} does not know it either: a newer one may, and then "
            "--model-impl transformers trains and samples transformers' own module instead, more slowly."
        ],
    ),
    ("--no-hf-checkpoint", ["--hf-checkpoint is missing: name the folder of the model to start from."]),
    (
        "--no-prompt-data",
        ["--prompt-data is missing: name a .jsonl, .parquet or .arrow file of prompts, or a folder of them."],
    ),
    (
        "--prompt-data data/tran.jsonl",
        ["--prompt-data data/tran.jsonl does not exist; data holds held.jsonl, train.jsonl."],
    ),
    ("--prompt-data data/notes.txt", ["--prompt-data data/notes.txt is not a .jsonl, .parquet or .arrow file."]),
    ("--prompt-data no/x.jsonl@[0:3]", ["--prompt-data no/x.jsonl does not exist, nor does the folder no."]),
    (
        "--prompt-data data/train.jsonl@[a:b]",
        [
            "The slice of data/train.jsonl@[a:b] must be two row numbers, either may be absent, "
            "as in file.jsonl@[0:100]."
        ],
    ),
    ("--ref-load nowhere", ["--ref-load nowhere does not exist; name the local folder of a Hugging Face checkpoint."]),
    ("--load nowhere", ["--load nowhere is not a folder; name a run or one of its checkpoints."]),
    ("--save good.toml", ["--save good.toml is a file; name a folder for the run."]),
    # what does not go together
    (
        "--no-num-rollout",
        ["--num-rollout is missing: say how many steps to train (or --num-epoch, how often to read the prompts)."],
    ),
    (
        "--num-epoch 2",
        ["--num-rollout and --num-epoch both set the length of the run; keep one (--no-num-epoch drops the other)."],
    ),
    (
        "--no-num-rollout --num-epoch 1 --rollout-batch-size 64",
        [
            "The 40 prompts of data/train.jsonl read --num-epoch 1 times do not fill one step of "
            "--rollout-batch-size 64; lower it, or read them more often."
        ],
    ),
    ("--no-rm-type", ["--rm-type is missing: name a built-in reward, or your own with --custom-rm-path."]),
    ("--custom-rm-path a.b:c", ["--rm-type and --custom-rm-path both name a reward; keep one."]),
    ("--rm-type remote_rm", ["--rm-type remote_rm asks a server: --rm-url is missing."]),
    (
        "--rm-type math:0.5+llm_judge:0.5",
        [
            "--rm-type llm_judge asks a server: --judge-url is missing.",
            "--rm-type llm_judge asks a server: --judge-model is missing.",
        ],
    ),
    (
        "--rm-type reward_model --reward-model-url localhost:30000",
        ["--reward-model-url localhost:30000 is not an address: write http://host:port/path."],
    ),
    (
        "--rm-type remote_rm --rm-url http://me:secret@host/score",
        [
            "--rm-url holds a password for all to see: put it in an environment variable and name that by "
            "--rm-token-env."
        ],
    ),
    (
        "--rm-type math:a+f1",
        ["--rm-type math:a+f1: the weight of math is 'a', which is not a number."],
    ),
    ("--rm-type f1+f1", ["--rm-type f1+f1 names f1 twice; give it one weight."]),
    (
        "--reward-timeout 2000",
        [
            "--reward-timeout 2000 is no sooner than --stall-timeout 1800, so one reward that hangs would stop the "
            "run; make it smaller."
        ],
    ),
    (
        "--grade-timeout 400",
        ["--grade-timeout 400 is no sooner than --reward-timeout 300; make it smaller."],
    ),
    (
        "--no-rm-type --custom-rm-path reward",
        ["--custom-rm-path reward is not an address: write package.module:name, or file.py:name."],
    ),
    (
        "--dynamic-sampling-filter-path nonzero",
        [
            "--dynamic-sampling-filter-path nonzero is not an address: write package.module:name, or file.py:name; "
            "built in are nonzero_std, keep_all."
        ],
    ),
    (
        "--global-batch-size 48",
        [
            "--rollout-batch-size 16 × --n-samples-per-prompt 8 = 128, which --global-batch-size 48 does not divide; "
            "32 or 64 would."
        ],
    ),
    (
        "--num-steps-per-rollout 3",
        [
            "--rollout-batch-size 16 × --n-samples-per-prompt 8 = 128, which --num-steps-per-rollout 3 does not "
            "divide; 2 or 4 would."
        ],
    ),
    (
        "--global-batch-size 64 --num-steps-per-rollout 4",
        [
            "--rollout-batch-size 16 × --n-samples-per-prompt 8 = 128, but --global-batch-size 64 × "
            "--num-steps-per-rollout 4 = 256; drop one of the last two."
        ],
    ),
    (
        "--n-samples-per-prompt 1",
        ["--advantage-estimator grpo compares attempts, so --n-samples-per-prompt must be at least 2."],
    ),
    (
        "--colocate --max-weight-staleness 2",
        ["--colocate and --max-weight-staleness 2 contradict each other: planes that take turns cannot run ahead."],
    ),
    (
        "--rollout-temperature 0",
        ["--rollout-temperature 0 is greedy, and all attempts at a prompt would be the same; use 1."],
    ),
    ("--kl-loss-coef 0.1", ["--kl-loss-coef 0.1 does nothing without --use-kl-loss; add that."]),
    (
        "--use-tis --use-rollout-logprobs",
        [
            "--use-tis weighs the trainer's log-probs against the engine's, and with --use-rollout-logprobs they are "
            "one and the same; drop one of the two."
        ],
    ),
    (
        "--use-rs --max-weight-staleness 2",
        [
            "--use-rs leaves tokens out and weighs none, and with --max-weight-staleness 2 those that older weights "
            "wrote need a weight; add --use-tis, or --no-use-rollout-logprobs to go without."
        ],
    ),
    ("--tis-clip 3", ["--tis-clip does nothing without --use-tis; add that."]),
    ("--use-tis --tis-clip 0.5", ["--tis-clip must be at least 1, not 0.5."]),
    ("--use-rs --rs-veto-threshold 1", ["--rs-veto-threshold must be above 0 and below 1, not 1."]),
    ("--use-tis --rs-upper-bound 3", ["--rs-upper-bound does nothing without --use-rs; add that."]),
    (
        "--tis-batch-normalize",
        ["--tis-batch-normalize does nothing without --use-tis or --use-rs; add one of them."],
    ),
    (
        "--use-tis --tis-mode icepop --tis-level geometric",
        ["--tis-mode icepop weighs single tokens; leave --tis-level geometric out."],
    ),
    (
        "--use-tis --tis-mode auto --tis-clip 3",
        ["--tis-mode auto brings the bounds of the mode it takes; leave --tis-clip out, or name the mode."],
    ),
    (
        "--use-tis --custom-tis-function-path a.b:c --use-rs",
        ["--use-rs is for the built-in corrections, which --custom-tis-function-path replaces; leave one out."],
    ),
    (
        "--use-tis --custom-tis-function-path clever",
        ["--custom-tis-function-path clever is not an address: write package.module:name, or file.py:name."],
    ),
    (
        "--loss-type custom_loss",
        ["--loss-type custom_loss needs --custom-loss-function-path: name the function that is to be minimised."],
    ),
    (
        "--custom-loss-function-path a.b:c",
        ["--custom-loss-function-path a.b:c does nothing without --loss-type custom_loss; add that."],
    ),
    (
        "--loss-type custom_loss --custom-loss-function-path a.b:c --use-opsm",
        ["--loss-type custom_loss replaces the policy loss, whose part --use-opsm is; leave one of them out."],
    ),
    (
        "--loss-type sft_loss --n-samples-per-prompt 1 --no-rm-type --overlong-buffer-len 3",
        ["--loss-type sft_loss learns from demonstrations, where --overlong-buffer-len means nothing; leave it out."],
    ),
    ("--loss-mask-type each", ["--loss-mask-type each does nothing without --loss-type sft_loss; leave it out."]),
    (
        "--loss-type sft_loss --n-samples-per-prompt 1 --no-rm-type --loss-mask-type last --no-apply-chat-template",
        ["--loss-mask-type last does nothing without --apply-chat-template, as a text has no turns; add that."],
    ),
    (
        "--loss-mask-type qwen3",
        ["--loss-mask-type takes one of all, last, each, not 'qwen3'."],
    ),
    (
        "--calculate-per-token-loss --constant-loss-length 64",
        ["--calculate-per-token-loss and --constant-loss-length each say how the loss is averaged; keep one."],
    ),
    (
        "--custom-convert-samples-to-train-data-path a.b:c --custom-reward-post-process-path a.b:d",
        [
            "--custom-convert-samples-to-train-data-path makes the rows itself, and never asks "
            "--custom-reward-post-process-path; keep one."
        ],
    ),
    (
        "--custom-convert-samples-to-train-data-path a.b:c --overlong-buffer-len 3",
        [
            "--custom-convert-samples-to-train-data-path makes the rows itself, and never sees --overlong-buffer-len; "
            "leave one of them out."
        ],
    ),
    (
        "--custom-reward-post-process-path a.b:c --advantage-role-key role",
        [
            "--custom-reward-post-process-path values attempts itself, so --advantage-role-key does nothing; leave one "
            "of them out."
        ],
    ),
    (
        "--advantage-estimator reinforce_plus_plus --normalize-advantages --advantage-role-key role",
        [
            "--advantage-role-key is for estimators that compare attempts, and reinforce_plus_plus does not; leave it "
            "out."
        ],
    ),
    (
        "--overlong-penalty-factor 2",
        ["--overlong-penalty-factor does nothing without --overlong-buffer-len; add that."],
    ),
    (
        "--overlong-buffer-len 65",
        [
            "--overlong-buffer-len 65 is longer than --rollout-max-response-len 64, at whose end it stands; lower it.",
        ],
    ),
    (
        "--advantage-estimator maxrl --overlong-buffer-len 8",
        ["--overlong-buffer-len makes rewards negative, and --advantage-estimator maxrl divides by their mean."],
    ),
    ("--opsm-delta 0.1", ["--opsm-delta does nothing without --use-opsm; add that."]),
    ("--use-unbiased-kl", ["--use-unbiased-kl does nothing without --use-kl-loss; add that."]),
    (
        "--advantage-estimator cispo --eps-clip-c 3",
        ["--eps-clip-c bounds a loss that --advantage-estimator cispo does not have; leave it out."],
    ),
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
    (
        "--loss-type sft_loss",
        [
            "--loss-type sft_loss learns from demonstrations, where --rm-type means nothing; leave it out.",
            "--loss-type sft_loss learns from demonstrations, where --n-samples-per-prompt means nothing; "
            "leave it out.",
        ],
    ),
    # several at once, and none that follows from another
    (
        "--hf-chekpoint x --lr x --rm-type f1+f1 --n-samples-per-prompt",
        [
            "--hf-chekpoint is not a flag; did you mean --hf-checkpoint?",
            "--lr takes a number, not 'x'.",
            "--n-samples-per-prompt needs a value: a whole number.",
            "--rm-type f1+f1 names f1 twice; give it one weight.",
        ],
    ),
    (
        "--no-rm-type --rm-typ math --num-rolout 3 --no-num-rollout",
        [
            "--rm-typ is not a flag; did you mean --rm-type?",
            "--num-rolout is not a flag; did you mean --num-rollout?",
        ],
    ),
]
