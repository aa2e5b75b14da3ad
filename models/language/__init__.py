"""Language models: one decoder for the families of transformers that it reads and writes."""
