"""Rules of the config: what a command refuses before anything starts, with the flag and the fix."""
