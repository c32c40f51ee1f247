"""What benchmarks share: ranks, arms and their times, records, and what stands in for a GPU."""
