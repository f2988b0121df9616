"""digits_app: a Flower / PyTorch app."""
