"""Fine-to-coarse attention: a block of queries reads its surroundings at a resolution that falls with the distance.

    level 0 of the tree: the S blocks of L tokens;   level p, node j: blocks j … j + 2^p − 1 as L means of 2^p tokens
    y_b = softmax(q_b K_bᵀ + bias + mask) V_b,   K_b, V_b the nodes that block b reads, in order (`nodes.py`)

The bias is T5's, of the distance in slots: L · (slots between the node and the own block) + r_k − r_q.
"""

from fathom.ops.fovea_attention.nodes import Nodes, levels_of, mean_nodes, nodes
from fathom.ops.fovea_attention.plain import Tree, fovea_attention, grow

__all__ = ["Nodes", "Tree", "fovea_attention", "grow", "levels_of", "mean_nodes", "nodes"]
