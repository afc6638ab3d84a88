"""What the update computes: advantages, weights, losses, KL, shaping and statistics, as pure functions of arrays.

Nothing here communicates, reads files or holds state. Importing this package imports neither torch nor numpy: the
rollout controller uses `shaping`, `dynamic` and `evaluation`, which never need torch; import the module that you need.

    shaping, dynamic     rewards and groups, where samples are made                         (plain Python)
    staleness            weight versions of tokens -> which leave the loss                  (numpy)
    advantages           rewards -> one advantage a sample                                  (numpy)
    normalisation        token counts -> one weight a sample                                (numpy)
    losses, kl, spec     log-probs, advantages, weights -> the loss of one micro-batch      (torch)
    token_statistics     the same tensors -> sums for the metrics                           (torch)
    evaluation           pass@k and its intervals                                           (numpy)
    schedules            the learning rate of a step                                        (plain Python)
"""
