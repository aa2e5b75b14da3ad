"""Sparse attention that trains: a plan lists the keys that each group of queries keeps; one function computes with any plan.

cluster_plan.py ClusterPlan: the kept pairs, integers only
planners/       plans of queries and keys: clusters.py, tiles.py, patterns.py; of kmeans.py, selection.py (the rules), csr.py, topk.py
dispatch.py     clustered_attention(q, k, v, plan): the one function, and the choice of a kernel
kernels/        masked.py (the oracle, O(N^2)), grouped.py (CPU), triton_*.py, varlen.py, flex.py (CUDA), npu_kernels.py;
                packed.py, tail.py: shared parts, gathered sequences, and the means as a second part of the softmax
module.py, controller.py        the attention of a layer, and the controller of its threshold; mass_histogram.py: its histogram
"""

from .cluster_plan import ClusterMeans, ClusterPlan, TailClusters, Tiles, key_means
from .dispatch import SparseOutput, Stats, clustered_attention

__all__ = [
    "ClusterMeans",
    "ClusterPlan",
    "SparseOutput",
    "Stats",
    "TailClusters",
    "Tiles",
    "clustered_attention",
    "key_means",
]
