"""Values by prompt: which tokens count, which prompts are compared, and tables of them."""
