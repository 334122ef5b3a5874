"""What runs for one token: stages of decoder layers, their exits, and the caches behind them."""
