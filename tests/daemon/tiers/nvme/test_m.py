import os
from hypothesis import Phase, settings
from machines import in_first_ring
from nvme_machine import NvmeMachine

TestTier = in_first_ring(NvmeMachine, examples=int(os.environ.get("N", "100")), steps=50)
TestTier.settings = settings(TestTier.settings, phases=[Phase.generate])
