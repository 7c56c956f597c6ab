#!/usr/bin/env bash
# GRPO on one GPU: engine and trainer take turns on it. More flags may follow, and win.
source "$(dirname "$0")/common.sh"
run_miles "${TASK[@]}" --rollout-batch-size 32 --gradient-checkpointing --max-tokens-per-gpu 16384 "$@"
