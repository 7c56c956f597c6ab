"""Server processes of remote engines: local subprocesses, Ray actors, external addresses (layer 3)."""
