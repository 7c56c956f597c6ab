#!/usr/bin/env bash
# GRPO on two machines of eight GPUs with Ray: one trains, one generates. Both see $MODEL (or HF_HOME) and $SAVE.
#
#   machine 1:  ray start --head --port 6379
#   machine 2:  ray start --address MACHINE1:6379
#   machine 1:  scripts/two_nodes_ray.sh
source "$(dirname "$0")/common.sh"
run_miles "${TASK[@]}" --rollout-batch-size 128 --gradient-checkpointing --max-tokens-per-gpu 16384 \
    --runtime ray --ray-address "${RAY_ADDRESS:-auto}" \
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 \
    --rollout-backend served --rollout-num-gpus 8 --rollout-num-gpus-per-engine 1 \
    --max-weight-staleness 1 "$@"
