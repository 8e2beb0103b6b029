"""From tokens on disk to the micro-batches of one rank: streams, mixtures, packing, loader."""
