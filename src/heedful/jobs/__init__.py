"""What a run trains on and is judged by."""
