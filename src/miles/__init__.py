"""Miles: post-train a language model with reinforcement learning. Start at launch/main.py."""

__version__ = "0.1.0"
