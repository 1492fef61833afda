"""What the commands share: a terminal to print on, processes of ranks, and torchrun."""
