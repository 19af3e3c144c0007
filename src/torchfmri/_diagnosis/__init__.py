"""Diagnosis: what is wrong, where, when, why and what to do."""
