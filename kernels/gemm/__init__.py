"""The persistent GEMM: its body's parts, its configs, and the way to a launch.

May import the modules beside the rooms. Overlapped operations take the body for tiles of their own.
"""
