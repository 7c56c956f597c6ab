"""Invalid algorithm and data options, and every error message each must produce."""

LEARNING: list[tuple[str, list[str]]] = [
    (
        "--no-num-rollout",
        [
            "--num-rollout is missing: give the number of training steps (or of epochs with --num-epoch).",
        ],
    ),
    (
        "--num-epoch 2",
        [
            "--num-rollout and --num-epoch both set the length of the run; keep one (--no-num-epoch unsets it).",
        ],
    ),
    (
        "--no-num-rollout --num-epoch 1 --rollout-batch-size 64",
        [
            "The 40 prompts of data/train.jsonl in --num-epoch 1 epochs do not fill one step of "
            "--rollout-batch-size 64; lower the batch size, or raise the epochs.",
        ],
    ),
    ("--no-rm-type", ["--rm-type is missing: name a built-in reward, or your own with --custom-rm-path."]),
    (
        "--no-rm-type --custom-generate-function-path multi_turn --apply-chat-template --generate-tools calculator",
        ["--rm-type is missing: name a built-in reward, or your own with --custom-rm-path."],
    ),
    (
        "--rm-type remote_rm",
        [
            "--rm-type remote_rm calls a server, but --rm-url is missing; add it.",
        ],
    ),
    (
        "--rm-type math:0.5+llm_judge:0.5",
        [
            "--rm-type llm_judge calls a server, but --judge-url is missing; add it.",
            "--rm-type llm_judge calls a server, but --judge-model is missing; add it.",
        ],
    ),
    (
        "--rm-type reward_model --reward-model-url localhost:30000",
        [
            "--reward-model-url localhost:30000 is not a URL: write http://host:port/path.",
        ],
    ),
    (
        "--rm-type remote_rm --rm-url http://me:secret@host/score",
        [
            "--rm-url contains a password: put it in an environment variable and name that with --rm-token-env.",
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
            "--reward-timeout 2000 is not below --stall-timeout 1800, so one reward that hangs would stop"
            " the run; lower it.",
        ],
    ),
    (
        "--grade-timeout 400",
        [
            "--grade-timeout 400 is not below --reward-timeout 300; lower it.",
        ],
    ),
    (
        "--no-rm-type --custom-rm-path reward",
        [
            "--custom-rm-path reward is not an import path: write package.module:name, or file.py:name.",
        ],
    ),
    (
        "--dynamic-sampling-filter-path nonzero",
        [
            "--dynamic-sampling-filter-path nonzero is not an import path: write package.module:name, or "
            "file.py:name; built in are nonzero_std, keep_all.",
        ],
    ),
    (
        "--global-batch-size 48",
        [
            "--rollout-batch-size 16 × --n-samples-per-prompt 8 = 128 is not divisible by "
            "--global-batch-size 48; use 32 or 64.",
        ],
    ),
    (
        "--num-steps-per-rollout 3",
        [
            "--rollout-batch-size 16 × --n-samples-per-prompt 8 = 128 is not divisible by "
            "--num-steps-per-rollout 3; use 2 or 4.",
        ],
    ),
    (
        "--global-batch-size 64 --num-steps-per-rollout 4",
        [
            "--rollout-batch-size 16 × --n-samples-per-prompt 8 = 128, but --global-batch-size 64 × "
            "--num-steps-per-rollout 4 = 256; remove one of the last two.",
        ],
    ),
    (
        "--n-samples-per-prompt 1",
        [
            "--advantage-estimator grpo compares trajectories; set --n-samples-per-prompt to at least 2.",
        ],
    ),
    (
        "--colocate --max-weight-staleness 2",
        [
            "--colocate runs trainer and engines in turns, so --max-weight-staleness 2 is not possible; "
            "remove one of them.",
        ],
    ),
    (
        "--rollout-temperature 0",
        [
            "--rollout-temperature 0 is greedy, so all trajectories of a prompt would be equal; use 1.",
        ],
    ),
    (
        "--kl-loss-coef 0.1",
        [
            "--kl-loss-coef needs --use-kl-loss; add that, or remove --kl-loss-coef.",
        ],
    ),
    (
        "--use-tis --use-rollout-logprobs",
        [
            "--use-tis compares the logprobs of trainer and engine, which --use-rollout-logprobs makes "
            "equal; remove one of them.",
        ],
    ),
    (
        "--use-rs --max-weight-staleness 2",
        [
            "--use-rs only masks tokens, but tokens of older weights (--max-weight-staleness 2) need "
            "importance weights; add --use-tis, or --no-use-rollout-logprobs to train without them.",
        ],
    ),
    (
        "--tis-clip 3",
        [
            "--tis-clip needs --use-tis; add that, or remove --tis-clip.",
        ],
    ),
    ("--use-tis --tis-clip 0.5", ["--tis-clip must be at least 1, not 0.5."]),
    ("--use-rs --rs-veto-threshold 1", ["--rs-veto-threshold must be above 0 and below 1, not 1."]),
    (
        "--use-tis --rs-upper-bound 3",
        [
            "--rs-upper-bound needs --use-rs; add that, or remove --rs-upper-bound.",
        ],
    ),
    (
        "--tis-batch-normalize",
        [
            "--tis-batch-normalize needs --use-tis or --use-rs; add that, or remove --tis-batch-normalize.",
        ],
    ),
    (
        "--use-tis --tis-mode icepop --tis-level geometric",
        [
            "--tis-mode icepop works on single tokens; remove --tis-level geometric.",
        ],
    ),
    (
        "--use-tis --tis-mode auto --tis-clip 3",
        [
            "--tis-mode auto sets the bounds itself; remove --tis-clip, or name the mode.",
        ],
    ),
    (
        "--use-tis --custom-tis-function-path a.b:c --use-rs",
        [
            "--use-rs is for the built-in corrections, which --custom-tis-function-path replaces; remove one of them.",
        ],
    ),
    (
        "--use-tis --custom-tis-function-path clever",
        [
            "--custom-tis-function-path clever is not an import path: write package.module:name, or file.py:name.",
        ],
    ),
    (
        "--loss-type custom_loss",
        [
            "--loss-type custom_loss needs --custom-loss-function-path: name the loss function.",
        ],
    ),
    (
        "--custom-loss-function-path a.b:c",
        [
            "--custom-loss-function-path needs --loss-type custom_loss; add that, or remove "
            "--custom-loss-function-path.",
        ],
    ),
    (
        "--loss-type custom_loss --custom-loss-function-path a.b:c --use-opsm",
        [
            "--loss-type custom_loss replaces the policy loss that --use-opsm belongs to; remove one of them.",
        ],
    ),
    (
        "--loss-type sft_loss --n-samples-per-prompt 1 --no-rm-type --overlong-buffer-len 3",
        [
            "--loss-type sft_loss trains on demonstrations, so --overlong-buffer-len has no effect; remove it.",
        ],
    ),
    (
        "--loss-type sft_loss --n-samples-per-prompt 1 --no-rm-type --custom-generate-function-path multi_turn "
        "--apply-chat-template",
        [
            "--loss-type sft_loss generates nothing, so multi-turn generation has no effect; remove it.",
            "--loss-type sft_loss trains on demonstrations, so --custom-generate-function-path has no "
            "effect; remove it.",
        ],
    ),
    (
        "--loss-mask-type each",
        [
            "--loss-mask-type needs --loss-type sft_loss; add that, or remove --loss-mask-type.",
        ],
    ),
    (
        "--loss-type sft_loss --n-samples-per-prompt 1 --no-rm-type --loss-mask-type last --no-apply-chat-template",
        [
            "--loss-mask-type needs --apply-chat-template, since plain text has no turns; add that, or "
            "remove --loss-mask-type.",
        ],
    ),
    (
        "--loss-mask-type none",
        ["--loss-mask-type takes one of all, last, each, not 'none'."],
    ),
    (
        "--calculate-per-token-loss --constant-loss-length 64",
        [
            "--calculate-per-token-loss and --constant-loss-length each set how the loss is averaged; keep one.",
        ],
    ),
    (
        "--custom-convert-samples-to-train-data-path a.b:c --custom-reward-post-process-path a.b:d",
        [
            "--custom-convert-samples-to-train-data-path builds the samples itself and never calls "
            "--custom-reward-post-process-path; keep one.",
        ],
    ),
    (
        "--custom-convert-samples-to-train-data-path a.b:c --overlong-buffer-len 3",
        [
            "--custom-convert-samples-to-train-data-path builds the samples itself and ignores "
            "--overlong-buffer-len; remove one of them.",
        ],
    ),
    (
        "--custom-reward-post-process-path a.b:c --advantage-role-key role",
        [
            "--custom-reward-post-process-path computes advantages itself and ignores "
            "--advantage-role-key; remove one of them.",
        ],
    ),
    (
        "--advantage-estimator reinforce_plus_plus --normalize-advantages --advantage-role-key role",
        [
            "--advantage-role-key is for estimators that compare trajectories, which reinforce_plus_plus "
            "does not; remove it.",
        ],
    ),
    (
        "--overlong-penalty-factor 2",
        [
            "--overlong-penalty-factor needs --overlong-buffer-len; add that, or remove --overlong-penalty-factor.",
        ],
    ),
    (
        "--overlong-buffer-len 65",
        [
            "--overlong-buffer-len 65 is longer than --rollout-max-response-len 64, whose last tokens it "
            "penalizes; lower it.",
        ],
    ),
    (
        "--advantage-estimator maxrl --overlong-buffer-len 8",
        [
            "--overlong-buffer-len makes rewards negative, and --advantage-estimator maxrl divides by "
            "their mean; remove one of them.",
        ],
    ),
    (
        "--opsm-delta 0.1",
        [
            "--opsm-delta needs --use-opsm; add that, or remove --opsm-delta.",
        ],
    ),
    (
        "--use-unbiased-kl",
        [
            "--use-unbiased-kl needs --use-kl-loss; add that, or remove --use-unbiased-kl.",
        ],
    ),
    (
        "--advantage-estimator cispo --eps-clip-c 3",
        [
            "--eps-clip-c bounds a loss that --advantage-estimator cispo does not have; remove it.",
        ],
    ),
    (
        "--loss-type sft_loss",
        [
            "--loss-type sft_loss trains on demonstrations, so --rm-type has no effect; remove it.",
        ],
    ),
    (
        "--loss-type sft_loss --no-rm-type --n-samples-per-prompt 4",
        ["--loss-type sft_loss trains on demonstrations, so --n-samples-per-prompt has no effect; remove it."],
    ),
]
