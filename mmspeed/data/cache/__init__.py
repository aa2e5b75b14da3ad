"""The dataset cache on disk: tables, shards, index, checksums, local or remote."""
