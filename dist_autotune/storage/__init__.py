"""Winners and crash guards on disk. May import triton_api; never logs."""
