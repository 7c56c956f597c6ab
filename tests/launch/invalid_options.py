"""Invalid command lines, and every error message each must produce."""

from importlib.metadata import version

from tests.launch.invalid_algorithms import LEARNING
from tests.launch.invalid_layouts import LAYOUTS

from miles.models.families.registry import FAMILIES

# A complete recipe, and what is wrong with a command line that says this as well.
WRONG: list[tuple[str, list[str]]] = [
    # words
    ("--rollout-batch-sise 3", ["--rollout-batch-sise is not a flag; did you mean --rollout-batch-size?"]),
    ("--rollout_batch_size 16", ["--rollout_batch_size is not a flag; did you mean --rollout-batch-size?"]),
    ("--kumquat", ["--kumquat is not a flag; see --help all."]),
    ("-lr 3", ["-lr is not a flag; did you mean --lr?"]),
    ("more.toml", ["'more.toml' is not expected here: values follow their flag, as in --lr 1e-6."]),
    ("--colocate more.toml", ["--colocate takes no value, but was given 'more.toml'."]),
    ("--lr", ["--lr needs a value: a number."]),
    ("--lr --colocate", ["--lr needs a value: a number."]),
    ("--lr abc", ["--lr takes a number, not 'abc'."]),
    ("--lr 1,5", ["--lr takes a number, not '1,5'."]),
    ("--lr 1e-6 2e-6", ["--lr takes one value, but was given 2: 1e-6 2e-6."]),
    ("--lr nan", ["--lr takes a number, not 'nan'."]),
    ("--num-rollout 1e3", ["--num-rollout takes a whole number, not '1e3'."]),
    ("--num-rollout ten", ["--num-rollout takes a whole number, not 'ten'."]),
    (
        "--hf-checkpoint ''",
        ["--hf-checkpoint was given an empty value, but takes text (is a shell variable unset?)."],
    ),
    ("--use-kl-loss true", ["--use-kl-loss takes no value, but was given 'true'."]),
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
            "--attention-dropout 0.1 asks for dropout in training, which is not supported.",
        ],
    ),
    (
        "--sglang-mem-fraction-static 1.8",
        [
            "--engine-memory-fraction must be above 0 and at most 1, not 1.8.",
        ],
    ),
    (
        "--rollout-backend sglang --sglang-python /no/such/python --sglang-port 1 --rollout-max-restarts -1",
        [
            "--rollout-max-restarts must be at least 0, not -1.",
            "--sglang-port is set by Miles; remove it.",
            "--sglang-python /no/such/python is not an executable; name a Python interpreter.",
        ],
    ),
    (
        "--rollout-num-engines 2",
        [
            "--rollout-num-engines needs --rollout-backend served or sglang; add that, or remove "
            "--rollout-num-engines.",
        ],
    ),
    (
        "--rollout-external-engine-addrs http://a:1 http://a:1 --rollout-num-engines 2",
        [
            "--rollout-external-engine-addrs names running servers, so --rollout-num-engines has no effect; remove it.",
            "--rollout-external-engine-addrs names a server twice; name each once.",
        ],
    ),
    (
        "--rollout-engine-token-env NO_SUCH_VARIABLE_HERE --rollout-external-engine-addrs http://a:1",
        [
            "--rollout-engine-token-env NO_SUCH_VARIABLE_HERE: this environment variable is unset or empty; set it.",
        ],
    ),
    (
        "--rollout-backend served --rollout-num-gpus 3 --rollout-num-gpus-per-engine 2",
        [
            "--rollout-num-gpus 3 is not a multiple of --rollout-num-gpus-per-engine 2; change one of them.",
        ],
    ),
    (
        "--num-layers 28",
        [
            "--num-layers 28 disagrees with config.json of --hf-checkpoint, which says 2; remove it.",
        ],
    ),
    (
        "--fp8-format e4m3",
        [
            "--fp8-format e4m3 is about training in FP8; add --train-precision fp8 (Megatron's blockwise recipe), or "
            "remove it.",
        ],
    ),
    (
        "--wandb-project P",
        ["--wandb-project needs --use-wandb; add that, or remove --wandb-project."],
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
        ["--hf-checkpoint nowhere does not exist; name the folder of a Hugging Face checkpoint, or hf://ORG/NAME."],
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
            f"The installed transformers {version('transformers')} does not support it either: upgrade it, and then "
            "--model-impl transformers runs transformers' own module instead, more slowly."
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
    (
        "--ref-load nowhere",
        ["--ref-load nowhere does not exist; name the folder of a Hugging Face checkpoint, or hf://ORG/NAME."],
    ),
    ("--load nowhere", ["--load nowhere is not a folder; name a run or one of its checkpoints."]),
    ("--save good.toml", ["--save good.toml is a file; name a folder for the run."]),
    # what does not go together
    *LEARNING,
    *LAYOUTS,
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
