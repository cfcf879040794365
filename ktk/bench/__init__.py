"""Measures MoE layers against what the machine can do: the limits, the runner, the report.

`ktk bench` is the command; `ktk.bench.limits` is useful on its own::

    from ktk.bench.limits import measure_limits, roofline

    limits = measure_limits(threads=2)
    bound = roofline(limits, nbytes=75e6, flops=75e6, units=("avx512_bf16", "avx512_fma"))
    print(bound.seconds, bound.bound)
"""
