"""Rollouts: prompts -> trajectories -> rewards -> groups (layer 2).

Imports: core, config, hooks, observe, stdlib, numpy; pyarrow only when a Parquet or Arrow file is read.
Never: train, schedule, backends, torch, transformers. Tokenizers and engines are passed in.
"""
