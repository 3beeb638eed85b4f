"""Nets as graphs that torch compiles ahead of time."""

# Of compiled graphs; those of nets that generate have no bfloat16.
ENCODER_PRECISIONS = ("float32", "bfloat16", "int8")
GENERATOR_PRECISIONS = ("float32", "int8")
