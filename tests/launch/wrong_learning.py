"""Command lines that say what cannot be learned from or learned so, and every sentence each must be told."""

LEARNING: list[tuple[str, list[str]]] = [
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
    (
        "--no-rm-type --custom-generate-function-path multi_turn --apply-chat-template --generate-tools calculator",
        ["--rm-type is missing: name a built-in reward, or your own with --custom-rm-path."],
    ),
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
    (
        "--loss-type sft_loss --n-samples-per-prompt 1 --no-rm-type --custom-generate-function-path multi_turn "
        "--apply-chat-template",
        [
            "--loss-type sft_loss learns from demonstrations, where --custom-generate-function-path means nothing; "
            "leave it out.",
            "--loss-type sft_loss samples nothing, so nobody answers in several turns; leave that out.",
        ],
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
        "--loss-type sft_loss",
        [
            "--loss-type sft_loss learns from demonstrations, where --rm-type means nothing; leave it out.",
            "--loss-type sft_loss learns from demonstrations, where --n-samples-per-prompt means nothing; "
            "leave it out.",
        ],
    ),
]
