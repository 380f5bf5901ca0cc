"""The nearest name, for the end of an error sentence."""

from vlightning.common.names import did_you_mean, nearest


def test_nearest_names():
    assert did_you_mean("ALBEFModul", ["ALBEFModule", "Other"]) == "did you mean 'ALBEFModule'?"
    assert did_you_mean("dmi", ["dim", "kind"], "--model.") == "did you mean '--model.dim'?"
    assert did_you_mean("zzz", ["fit", "test"]) == "use one of fit, test."
    assert did_you_mean("zzz", [f"name{n}" for n in range(40)]).endswith("name19 and 28 more.")
    assert nearest("MODEL", ["model", "other"]) == ["model"]
