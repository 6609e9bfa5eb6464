"""What a provisioner decides, without I/O."""
