"""Room: rollout -- the plane that makes experience: prompts -> attempts -> rewards -> groups.

Floor 2. Imports: core, config, plug, observe, stdlib, numpy; pyarrow only when a Parquet or Arrow file is read.
Never: train, schedule, backends, torch, transformers. Tokenizers and engines are handed to it.
"""
