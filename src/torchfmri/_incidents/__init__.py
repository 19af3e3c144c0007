"""Non-finite values: noticed at every step, held before they reach the weights, traced back."""
