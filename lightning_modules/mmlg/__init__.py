"""MM-LG: a learngene out of CLIP, which CLIPs of other depths start from."""
