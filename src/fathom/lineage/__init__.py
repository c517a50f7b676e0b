"""The `lineage` wing: which model does this one come from? Fingerprints of weights."""
