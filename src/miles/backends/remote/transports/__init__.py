"""Weight transports to remote engines: HTTP, NCCL, disk, delta, CUDA IPC, LoRA (layer 3)."""
