"""The package's own face."""

from importlib import import_module

import tutel_pack


def test_functions_stay_functions_when_sub_packages_are_imported():
    for _ in range(2):
        assert callable(tutel_pack.load_packed) and callable(tutel_pack.convert_checkpoint)
        import_module("tutel_pack.convert.pipeline")
