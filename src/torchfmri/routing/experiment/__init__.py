"""The experiment that compares what routing learns from."""
