"""DeepSeek-V4.1-Flash in JAX and Flax.

Axis letters, used in every shape:

    B, T  batch, query tokens                  E, A  experts, experts active per token
    S     compressed slots, S = T // ratio     F     expert inner width
    W     sliding window                       G, Do output groups, output low-rank width
    K     selected slots per query (top-k)     Dq    query low-rank width
    C     candidate blocks                     V, L  vocabulary, layers
    M, D  residual copies, model width         N, P  n-gram hash heads, image patches
    H, Dh, Dr  heads, head (= latent) width, rotary part
    Hi, Di     index heads, index width

Logical axes of weights, read by sharding: embed (D), vocab (V), copies (M), mix (hyper-connection outputs), heads,
head_dim, q_latent, kv_latent, groups, group_in, o_latent, group_latent, index_heads, index_dim, experts (of a
router), expert_stack, expert_width, ngram_rows, ngram_dim, ngram_in, branch.
"""
