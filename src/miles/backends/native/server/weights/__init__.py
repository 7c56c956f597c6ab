"""Weight updates of the engine's HTTP server: staging, CUDA IPC, process groups, LoRA merge (layer 3)."""
