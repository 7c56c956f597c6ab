# Sourced by the scripts of this folder: what they train on what, from the environment, and the command they run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

MODEL=${MODEL:-Qwen/Qwen3-0.6B}            # a folder, or a name on the hub
DATA=${DATA:-openai/gsm8k@train}           # files, or a split on the hub
INPUT_KEY=${INPUT_KEY:-question}
LABEL_KEY=${LABEL_KEY:-answer}
REWARD=${REWARD:-gsm8k}
SAVE=${SAVE:-runs/$(basename "$0" .sh)}
MILES_COMMAND=${MILES_COMMAND:-train}      # plan prints what the script would do; check tests the machine too

TASK=(
    --hf-checkpoint "$MODEL"
    --prompt-data "$DATA" --input-key "$INPUT_KEY" --label-key "$LABEL_KEY" --apply-chat-template
    --rm-type "$REWARD"
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28
    --rollout-max-response-len 1024 --n-samples-per-prompt 8
    --num-rollout 200 --lr 1e-6 --save-interval 20 --save "$SAVE"
)

run_miles() {
    echo "miles $MILES_COMMAND $*" >&2
    exec "${PYTHON:-python}" -m miles "$MILES_COMMAND" "$@"
}
