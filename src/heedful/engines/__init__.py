"""What runs a model: the net itself, and other engines that were made of its tensors."""
