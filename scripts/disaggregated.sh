#!/usr/bin/env bash
# GRPO on eight GPUs of one machine, disaggregated: four train while four generate, with weights at most one step old.
source "$(dirname "$0")/common.sh"
run_miles "${TASK[@]}" --rollout-batch-size 128 --gradient-checkpointing --max-tokens-per-gpu 16384 \
    --actor-num-gpus-per-node 4 \
    --rollout-backend served --rollout-num-gpus 4 --rollout-num-gpus-per-engine 1 \
    --max-weight-staleness 1 "$@"
