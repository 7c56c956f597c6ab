#!/usr/bin/env bash
# GRPO on the eight GPUs of one machine, colocated: eight engines and eight trainer ranks share them and take turns.
source "$(dirname "$0")/common.sh"
run_miles "${TASK[@]}" --rollout-batch-size 128 --gradient-checkpointing --max-tokens-per-gpu 16384 \
    --actor-num-gpus-per-node 8 --colocate \
    --rollout-backend served --rollout-num-gpus 8 --rollout-num-gpus-per-engine 1 "$@"
