"""What a run will cost, by formula: bytes and seconds before anything is started. Without torch."""
