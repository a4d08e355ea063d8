"""What runs in the sandboxes that grade a kernel. Stands alone: it is copied there, and knows torch and Triton only.

It has the same name there, below packages that are empty.
"""
