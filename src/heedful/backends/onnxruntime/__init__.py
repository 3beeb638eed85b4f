"""ONNX Runtime: nets written as ONNX graphs, and encoders run as a backend."""
