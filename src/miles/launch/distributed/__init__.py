"""Distributed training: the SPMD driver, fault tolerance, model construction on ranks, Ray placement (layer 4)."""
