"""The step on a device, by torch: accelerators, captured steps and torch.compile. Nothing is read back."""
