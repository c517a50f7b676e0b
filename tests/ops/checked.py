"""Operations with their shape annotations checked at run time."""

from jaxtyping import jaxtyped

from fathom.ops import cross_entropy, eager_attention, rotary, vocabulary_mixture

try:
    from beartype import beartype
except ImportError:  # a GPU machine that holds torch and pytest only: values are compared there all the same
    beartype = None

check = jaxtyped(typechecker=beartype)
rotate = check(rotary.rotate)
eager = check(eager_attention.eager_attention)
mixture = check(vocabulary_mixture.vocabulary_mixture)
top_k_indices = check(vocabulary_mixture.top_k_indices)
linear_cross_entropy = check(cross_entropy.linear_cross_entropy)
plain_cross_entropy = check(cross_entropy.cross_entropy)
