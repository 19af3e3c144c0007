"""A check-up: a short training run on copies, observed more closely than a Monitor could afford."""
