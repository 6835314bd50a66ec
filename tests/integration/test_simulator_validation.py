from tiered_kv.sim.validate import run


def test_the_simulator_is_compared_with_the_real_node() -> None:
    found = {result.name: result for result in run(rounds=1)}
    assert {name.rsplit("/", 1)[1] for name in found} == {"wake", "throughput"}
    assert len(found) == 4
    for result in found.values():  # how near they are is a measurement, and belongs to the command
        assert result.value > 0
        assert result.against_value is not None
        assert result.against_value > 0
