"""All studies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from noria.simulation.studies.autoscaling import autoscaling_study
from noria.simulation.studies.eviction import eviction_study
from noria.simulation.studies.preemptions import preemptions_study
from noria.simulation.studies.presets import presets_study
from noria.simulation.studies.ratio import ratio_study
from noria.simulation.studies.roofline import roofline_study
from noria.simulation.studies.sarathi import sarathi_study
from noria.simulation.studies.study import Study
from noria_bench.lengths import LengthLaw


def all_studies(trace_laws: Mapping[str, LengthLaw]) -> Mapping[str, Callable[[], Study]]:
    """In the order in which to read them. trace_laws: output lengths of traces by name, for the ratio."""
    return {
        "ratio": partial(ratio_study, trace_laws),
        "roofline": roofline_study,
        "sarathi": sarathi_study,
        "eviction": eviction_study,
        "preemptions": preemptions_study,
        "presets": presets_study,
        "autoscaling": autoscaling_study,
    }
