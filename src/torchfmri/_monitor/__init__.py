"""The Monitor: stays on while a model trains."""
