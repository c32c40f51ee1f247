"""Known results, winners and crash guards on disk. May import triton_api, search and ranks; never logs."""
