"""lenz: a compiler for PyTorch programs, behind torch.compile(model, backend="lenz")."""
