"""What runs in the sandboxes that grade a kernel. Stands alone: it is copied there, and knows torch and Triton only.

Modules import each other relatively, because the package has another name there.
"""
