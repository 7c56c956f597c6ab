"""Draft models of speculative decoding: MTP layers of a checkpoint, or an EAGLE-3 head. Layer 1; may import the other
packages of ``models``; knows no engine and no trainer.
"""
