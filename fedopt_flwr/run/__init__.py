"""One run: put together, driven, written down, resumed."""
