"""Elastic runs: scaling the number of engines and trainer ranks while a run goes on (layer 4)."""
