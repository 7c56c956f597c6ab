"""Model runners: execute one forward batch on a device, with CUDA graphs and sampling (layer 3)."""
