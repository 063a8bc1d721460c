"""The `class_bpb` metric and its engine, `statistics`."""
