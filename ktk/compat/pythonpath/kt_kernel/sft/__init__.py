"""In the place of kt-kernel's fine-tuning, which ktk does by other means."""

raise ImportError(
    "kt_kernel.sft is not here, because this kt_kernel is ktk: train experts with ktk.sft, or "
    "start without ktk compat where kt-kernel itself is installed",
    name=__name__,
)
