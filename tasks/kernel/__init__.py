"""Write a faster Triton or CUDA kernel for a PyTorch reference, in the manner of KernelBench."""
