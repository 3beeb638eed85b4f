"""The cost of a training step: FLOPs, memory, bytes sent and time, without allocating a net."""
