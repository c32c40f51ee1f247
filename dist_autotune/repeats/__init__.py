"""What the runs of one replayed call share: state put back, arguments handed out anew. May import launch."""
